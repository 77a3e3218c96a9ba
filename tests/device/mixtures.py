"""Features in combination on the device: what each does alone is in `scenarios`, and mistakes sit where two meet."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm import hooks
from phalanx.ddp.features.precision import MixedPrecision
from phalanx.ddp.reducer.hooks import GradientHooks
from phalanx.ddp.reducer.reducer import Reducer
from phalanx.observe import trace
from phalanx.optim import apply_in_backward

from .scenarios import Net, Step
from .streams import Stream, current_stream

_LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def _mixed(
    options: dict[str, Any] | None = None,
    hook: tuple[Any, Callable[[], Any]] | None = None,
    zero: dict[str, Any] | None = None,
    weight: bool = False,
    accumulates: bool = False,
    clip: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """One step with any of these together."""
    ddp = phalanx.DistributedDataParallel(
        Net().to("sim").to(dtype), bucket_cap_mb=0.01, on_unused="ignore", **(options or {})
    )
    if hook is not None:
        ddp.register_comm_hook(hook[1](), hook[0])
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    if zero is not None:
        optimizer = phalanx.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, **zero)

    def step(x: torch.Tensor) -> None:
        x = x.to(dtype)
        with ddp.weight(3.0) if weight else contextlib.nullcontext():
            if accumulates:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
            ddp(x).square().mean().backward()
        if clip and zero is not None:
            optimizer.clip_grad_norm_(1.0)
        elif clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Checkpointed(nn.Module):
    """Computes its middle again in backward; `reentrant`: by a backward inside backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(self.middle, self.first(x), use_reentrant=self._reentrant)
        out: torch.Tensor = self.last(inner)
        return out


def _checkpointed(reentrant: bool, **options: Any) -> Step:
    ddp = phalanx.DistributedDataParallel(_Checkpointed(reentrant).to("sim"), bucket_cap_mb=0.005, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _two_wrappers(zero: bool = False) -> Step:
    """Encoder and decoder, wrapped apart and trained by one backward."""
    encoder = phalanx.DistributedDataParallel(nn.Linear(16, 64).to("sim"), bucket_cap_mb=0.001)
    decoder = phalanx.DistributedDataParallel(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)).to("sim"), bucket_cap_mb=0.001)
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer: Any = torch.optim.SGD(params, lr=0.01)
    if zero:
        optimizer = phalanx.ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)

    def step(x: torch.Tensor) -> None:
        decoder(encoder(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_backward() -> Step:
    model = Net().to("sim")
    apply_in_backward(torch.optim.SGD, model.parameters(), lr=0.01)
    ddp = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.01)

    def step(x: torch.Tensor) -> None:
        ddp(x).square().mean().backward()

    return step


def _joining() -> Step:
    """A context per step: one batch of its own, then the rank has joined."""
    ddp = phalanx.DistributedDataParallel(Net().to("sim"), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        with ddp.join():
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _compiled() -> Step:
    ddp = phalanx.DistributedDataParallel(Net().to("sim"), bucket_cap_mb=0.01)
    model = torch.compile(ddp, backend="phalanx")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        assert ddp.reducer.choose_buckets is not None, "nothing was compiled"
        optimizer.step()
        optimizer.zero_grad()

    return step


def _delayed() -> Step:
    model = Net().to("sim")
    late = [("sometimes.weight", model.sometimes.weight), ("sometimes.bias", model.sometimes.bias)]
    ddp = phalanx.DistributedDataParallel(
        model,
        bucket_cap_mb=0.01,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=model.layers[0].weight,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _traced() -> Step:
    """Every step is timed by events while a trace is written."""
    step = _mixed()
    folder = tempfile.TemporaryDirectory()
    trace.start(folder.name, 0, 2)

    def traced(x: torch.Tensor) -> None:
        assert folder.name and trace.recorder is not None
        step(x)

    return traced


class _Branches:
    """Gradients accumulate on two streams in turn, as of a model whose branches were computed on two."""

    def __init__(self) -> None:
        self._streams = [Stream(name="the first branch's stream"), Stream(name="the second branch's stream")]
        self._stream_of: dict[torch.Tensor, Stream] = {}

    def place(self, params: list[nn.Parameter]) -> None:
        """What autograd does for a leaf: order its stream after what it is made of, and accumulate there."""
        for number, param in enumerate(params):
            self._stream_of[param] = self._streams[number % 2]
            param.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, param: torch.Tensor) -> None:
        stream = self._stream_of[param]
        stream.wait_stream(current_stream())
        if (grad := param.grad) is not None:
            with stream:
                param.grad = grad * 1.0
            grad.record_stream(stream)

    @contextlib.contextmanager
    def hooks_run_there(self) -> Iterator[None]:
        """Our hooks are called with that stream current; when backward has ended the caller's comes after both."""
        add, end = GradientHooks._add, Reducer.end

        def add_on_stream(hooks: GradientHooks, param: torch.Tensor, hook: Any) -> None:
            def on_stream(tensor: torch.Tensor) -> None:
                with self._stream_of[tensor]:
                    hook(tensor)

            add(hooks, param, on_stream)

        def end_joined(reducer: Reducer) -> Any:
            for stream in self._streams:
                current_stream().wait_stream(stream)
            return end(reducer)

        with (
            mock.patch.object(GradientHooks, "_add", add_on_stream),
            mock.patch.object(GradientHooks, "is_final", lambda *_: True),
            mock.patch.object(Reducer, "end", end_joined),
        ):
            yield


def _several_streams(**options: Any) -> Step:
    branches = _Branches()
    model = Net().to("sim")
    branches.place(list(model.parameters()))
    with branches.hooks_run_there():
        ddp = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        with branches.hooks_run_there():
            ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


_fp16 = (hooks.fp16_compress_hook, lambda: None)
_powersgd = (hooks.powerSGD_hook, partial(hooks.PowerSGDState, matrix_approximation_rank=2, start_powerSGD_iter=2))
_topk = (hooks.topk_hook, hooks.TopKState)
_int8 = (hooks.int8_hook, hooks.Int8State)
_poison = {"on_late_mismatch": "poison"}
_views, _static = {"gradient_as_bucket_view": True}, {"static_graph": True}
_overlap: dict[str, Any] = {"overlap_with_ddp": True}

MIXTURES: dict[str, Callable[[], Step]] = {
    "mixed precision, weights": partial(_mixed, {"mixed_precision": _LOW}, weight=True),
    "mixed precision, static, no_sync, clipped": partial(
        _mixed, {"mixed_precision": _LOW, **_static}, accumulates=True, clip=True
    ),
    "static, no_sync, fp16 hook": partial(_mixed, _static, _fp16, accumulates=True),
    "static, views, no_sync, weights": partial(_mixed, {**_static, **_views}, weight=True, accumulates=True),
    "views, fp16 hook, weights": partial(_mixed, _views, _fp16, weight=True),
    "topk hook, weights, no_sync": partial(_mixed, {}, _topk, weight=True, accumulates=True),
    "int8 hook, static, views": partial(_mixed, {**_static, **_views}, _int8),
    "powersgd hook, static, weights": partial(_mixed, _static, _powersgd, weight=True),
    "zero, weights, views, clipped": partial(_mixed, _views, zero={}, weight=True, clip=True),
    "zero by parameter, mixed precision": partial(_mixed, {"mixed_precision": _LOW}, zero={"partition": "parameter"}),
    "zero overlapped, weights, no_sync": partial(_mixed, {}, zero=_overlap, weight=True, accumulates=True),
    "zero overlapped, later, clipped, weights": partial(
        _mixed, {}, zero={**_overlap, "step_in_backward": False}, clip=True, weight=True
    ),
    "zero overlapped, static, stage 2": partial(_mixed, _static, zero={**_overlap, "stage": 2}),
    "zero overlapped, poison": partial(_mixed, _poison, zero=_overlap),
    "zero overlapped, powersgd hook": partial(_mixed, {}, _powersgd, zero=_overlap),
    "poison": partial(_mixed, _poison),
    "poison, weights, views": partial(_mixed, {**_poison, **_views}, weight=True),
    "poison, fp16 hook": partial(_mixed, _poison, _fp16),
    "float16 model, weights": partial(_mixed, {}, weight=True, dtype=torch.float16),
    "bfloat16 model, static": partial(_mixed, _static, dtype=torch.bfloat16),
    "float64 model, weights": partial(_mixed, {}, weight=True, dtype=torch.float64),
    "skip unused": partial(_mixed, {"skip_all_reduce_unused_params": True}),
    "checkpointing": partial(_checkpointed, False),
    "checkpointing, static, views": partial(_checkpointed, False, **_static, **_views),
    "two wrappers": _two_wrappers,
    "two wrappers, zero": partial(_two_wrappers, True),
    "step in backward": _in_backward,
    "delayed parameters": _delayed,
    "traced": _traced,
    "compiled": _compiled,
    "gradients on several streams": _several_streams,
    "gradients on several streams, static": partial(_several_streams, **_static),
}

# In these the host may wait (docs/design/devices.md): only their order is judged.
WAITING: dict[str, Callable[[], Step]] = {
    "reentrant checkpointing": partial(_checkpointed, True),
    "reentrant checkpointing, static": partial(_checkpointed, True, **_static),
    "join": _joining,
    "nonfinite skipped": partial(_mixed, {"on_nonfinite": "skip"}),
    "drift": partial(_mixed, {"check_drift_every": 1}),
}
