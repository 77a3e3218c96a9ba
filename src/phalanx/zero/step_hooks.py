"""A user's step hooks, run by us: an overlapped step begins and ends at two moments of a backward pass.

Torch wraps `step` with its hooks only for steps that are one call.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_PACKAGE = __name__.partition(".")[0]


def are_there(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of users run before a step. Ours only look, and are there in every program."""
    hooks = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith(f"{_PACKAGE}.") for hook in hooks)


def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what is to run before a step; returns the arguments, as the hooks may have replaced them."""
    # Private names of torch, but the only place where hooks are kept; tests/zero/test_usage.py notices if they move.
    mine = optimizer._optimizer_step_pre_hooks.values()
    for hook in chain(torch_optimizer._global_optimizer_pre_hooks.values(), mine):
        result = hook(optimizer, args, kwargs)
        if result is not None:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(
                    f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}."
                )
            args, kwargs = result
    return args, kwargs


def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run what is to run after a step."""
    # The other way round than before a step, as torch does it: hooks of all optimizers enclose those of this one.
    mine = optimizer._optimizer_step_post_hooks.values()
    for hook in chain(mine, torch_optimizer._global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)
