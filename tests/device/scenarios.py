"""What a GPU user trains: every way of reducing and stepping, a few steps of each, and what the ledger says of them.

A scenario is a function that makes a model on the device and returns one training step. The first steps may wait (plans are
compared and settled, state is made); those after `warm` are what is judged.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import phalanx
from phalanx.comm import hooks
from phalanx.ddp.features.precision import MixedPrecision
from phalanx.observe import trace

from .memory import ledger
from .streams import Stream, arrive, current_stream

Step = Callable[[torch.Tensor], None]
_WARM = 1
_NUM_JUDGED = 3
_WIDE = 300  # 256 x 300 elements: beyond every threshold for large gradients and for sampling


class Net(nn.Module):
    """A large and several small parameters, and buffers that change with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, _WIDE), nn.LayerNorm(_WIDE), nn.Linear(_WIDE, 4)),
        )
        self.sometimes = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, everything: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out + self.sometimes(x) if everything else out


@dataclass(frozen=True)
class Finding:
    """What the ledger says of the judged steps of one scenario; each text with how often it occurred."""

    num_steps: int
    num_operations: int
    syncs: dict[str, int] = field(default_factory=dict)
    races: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def _train(ddp: nn.Module, x: torch.Tensor, **kwargs: Any) -> None:
    ddp(x, **kwargs).square().mean().backward()


def _wrapped(**options: Any) -> phalanx.DistributedDataParallel:
    return phalanx.DistributedDataParallel(Net().to("sim"), bucket_cap_mb=0.01, on_unused="ignore", **options)


def _ddp(**options: Any) -> Step:
    ddp = _wrapped(**options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        _train(ddp, x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not options.get("gradient_as_bucket_view"))

    return step


def _accumulating() -> Step:
    ddp = _wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        with ddp.no_sync():
            _train(ddp, x)
        _train(ddp, x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _weighted(**options: Any) -> Step:
    ddp = _wrapped(**options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    counter = iter(range(1, 1000))

    def step(x: torch.Tensor) -> None:
        with ddp.weight(float(next(counter))):
            _train(ddp, x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _clipped() -> Step:
    ddp = _wrapped()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        _train(ddp, x)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hooked(hook: Any, make_state: Callable[[], Any] = lambda: None, **options: Any) -> Step:
    ddp = _wrapped(**options)
    ddp.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        _train(ddp, x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _zero(
    overlap: bool, clip: bool = False, ddp_options: dict[str, Any] | None = None, hook: Any = None, **options: Any
) -> Step:
    ddp = _wrapped(**(ddp_options or {}))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    zero = phalanx.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=overlap, **options
    )

    def step(x: torch.Tensor) -> None:
        _train(ddp, x)
        if clip:
            zero.clip_grad_norm_(1.0)
        zero.step()
        zero.zero_grad()

    return step


def _on_side_stream(inner: Callable[[], Step]) -> Step:
    """The user trains on a stream of his own."""
    stream = Stream(name="the user's stream")
    stream.wait_stream(current_stream())
    with stream:
        run = inner()

    def step(x: torch.Tensor) -> None:
        stream.wait_stream(current_stream())
        with stream:
            run(x)
        current_stream().wait_stream(stream)

    return step


_LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
_powersgd = partial(hooks.PowerSGDState, matrix_approximation_rank=2, start_powerSGD_iter=2)

SCENARIOS: dict[str, Callable[[], Step]] = {
    "ddp plain": _ddp,
    "ddp static": partial(_ddp, static_graph=True),
    "ddp views": partial(_ddp, gradient_as_bucket_view=True),
    "ddp static views": partial(_ddp, static_graph=True, gradient_as_bucket_view=True),
    "ddp find unused": partial(_ddp, find_unused_parameters=True),
    "ddp no_sync": _accumulating,
    "ddp without buffers": partial(_ddp, broadcast_buffers=False),
    "ddp mixed precision": partial(_ddp, mixed_precision=_LOW),
    "ddp weights": _weighted,
    "ddp weights views": partial(_weighted, gradient_as_bucket_view=True),
    "ddp clipped": _clipped,
    "ddp side stream": lambda: _on_side_stream(_ddp),
    "hook allreduce": partial(hooked, hooks.allreduce_hook),
    "hook noop": partial(hooked, hooks.noop_hook),
    "hook fp16": partial(hooked, hooks.fp16_compress_hook),
    "hook bf16": partial(hooked, hooks.bf16_compress_hook),
    "hook fp16 over allreduce": lambda: hooked(hooks.fp16_compress_wrapper(hooks.allreduce_hook)),
    "hook int8": partial(hooked, hooks.int8_hook, hooks.Int8State),
    "hook topk": partial(hooked, hooks.topk_hook, hooks.TopKState),
    "hook powersgd": partial(hooked, hooks.powerSGD_hook, _powersgd),
    "hook powersgd cold": partial(hooked, hooks.powerSGD_hook, partial(_powersgd, warm_start=False)),
    "hook bf16 over powersgd": lambda: hooked(hooks.bf16_compress_wrapper(hooks.powerSGD_hook), _powersgd),
    "hook torch fp16": partial(hooked, default_hooks.fp16_compress_hook),
    "hook torch bf16": partial(hooked, default_hooks.bf16_compress_hook),
    "hook torch allreduce": partial(hooked, default_hooks.allreduce_hook),
    "hook fp16 views": partial(hooked, hooks.fp16_compress_hook, gradient_as_bucket_view=True),
    "zero alone": partial(_zero, False),
    "zero alone, by parameter": partial(_zero, False, partition="parameter"),
    "zero alone, by parameter, without buffers": partial(
        _zero, False, partition="parameter", ddp_options={"broadcast_buffers": False}
    ),
    "zero alone, views": partial(_zero, False, parameters_as_bucket_view=True),
    "zero alone, stage 2, clipped": partial(_zero, False, clip=True, stage=2),
    "zero alone, clipped": partial(_zero, False, clip=True),
    "zero overlapped": partial(_zero, True),
    "zero overlapped, stage 2": partial(_zero, True, stage=2),
    "zero overlapped, by parameter": partial(_zero, True, partition="parameter"),
    "zero overlapped, views": partial(_zero, True, ddp_options={"gradient_as_bucket_view": True}),
    "zero overlapped, later": partial(_zero, True, step_in_backward=False),
    "zero overlapped, later, clipped": partial(_zero, True, clip=True, step_in_backward=False),
    "zero overlapped, stage 2, later": partial(_zero, True, stage=2, step_in_backward=False),
    "zero overlapped, stage 2, later, clipped": partial(_zero, True, clip=True, stage=2, step_in_backward=False),
    "zero overlapped, without buffers": partial(_zero, True, ddp_options={"broadcast_buffers": False}),
    "zero overlapped, mixed precision": partial(_zero, True, ddp_options={"mixed_precision": _LOW}),
    "zero overlapped, fp16 hook": partial(_zero, True, hook=hooks.fp16_compress_hook),
}
# Steps before the judged ones: the first settles the plan. PowerSGD has a few more of its own kind.
_POWERSGD_WARM = 4


def observe(name: str, make: Callable[[], Step] | None = None) -> Finding:
    """Train the scenario and look at its steps after the warm ones."""
    torch.manual_seed(0)
    warm = _POWERSGD_WARM if "powersgd" in name else _WARM
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _observe(make or SCENARIOS[name], warm, warm + _NUM_JUDGED)
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__)[-5:])
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
        return Finding(0, 0, error=f"{type(error).__name__}: {error} ({where})")
    finally:
        trace.stop()  # a scenario may have started one


def _observe(make: Callable[[], Step], warm: int, num_steps: int) -> Finding:
    inputs = [torch.randn(8, 16).to("sim") for _ in range(num_steps)]
    step = make()
    for number, x in enumerate(inputs):
        if number == warm:
            ledger.reset()
        step(x)
    with ledger.lock:
        arrive(everything=True)
        syncs = Counter(f"{sync.kind} at {sync.where}" for sync in ledger.syncs)
        races = Counter(f"{race.kind}: {race.first} AND {race.second}" for race in ledger.races)
        return Finding(num_steps - warm, ledger.num_operations, dict(syncs), dict(races))

