"""Torch's two ways to make a communication hook that steps, for programs written with them.

`overlap_with_ddp=True` is enough by itself here, so what is left of them is the hook inside: one that compresses is
used as given, and the plain average is left to the reduce-scatter, which is cheaper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..comm.hooks import Hook, allreduce_hook
from ..ddp.module import DistributedDataParallel
from ..errors import ArgumentTypeError, ConfigError
from .optimizer import ZeroRedundancyOptimizer
from .overlap.overlap import REPLACEABLE

# By name: to compare with the function itself would be to import what this package replaces.
_TORCH_AVERAGE = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "allreduce_hook")


def hook_with_zero_step(
    hook: Callable[..., torch.futures.Future[torch.Tensor]],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """A hook to register with `ddp`: buckets are reduced as `hook` does and stepped by `zero` during backward.

    `shard_buckets` is there for torch's signature: each bucket is divided among all ranks either way. Raises unless
    `zero` was made with overlap_with_ddp=True for parameters that `ddp` wraps.
    """
    if not isinstance(zero, ZeroRedundancyOptimizer) or not isinstance(ddp, DistributedDataParallel):
        raise ArgumentTypeError(
            "a hook that steps takes a phalanx.DistributedDataParallel and a phalanx.ZeroRedundancyOptimizer, got "
            f"{type(ddp).__name__} and {type(zero).__name__}."
        )
    if zero._overlap is None:
        raise ConfigError("the ZeroRedundancyOptimizer must be made with overlap_with_ddp=True to step in a hook.")
    # An optimizer works for its latest wrapper only: buckets of an earlier one would be reduced and stepped by nobody.
    if zero._overlap.wrapper is not ddp:
        raise ConfigError("the ZeroRedundancyOptimizer works with another wrapper than the one given. Give the latest.")
    averages = hook is allreduce_hook or (
        getattr(hook, "__module__", None),
        getattr(hook, "__name__", None),
    ) == _TORCH_AVERAGE

    # A function of its own: the mark must not stay on the user's hook, which may also serve a wrapper without ZeRO.
    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    setattr(run, REPLACEABLE, averages)
    return run


def hook_with_zero_step_interleaved(
    hook: Callable[..., torch.futures.Future[torch.Tensor]],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """The same as `hook_with_zero_step`: steps and reductions of different buckets always interleave."""
    return hook_with_zero_step(hook, ddp, zero, shard_buckets)
