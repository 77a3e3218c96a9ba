"""Values, where order is enforced by NaN: a group whose outputs are not numbers until somebody waited for them.

Two ranks on CPU tensors. Whoever reads, packs, steps or gives out before the wait trains with NaN, and training is
compared with one process. The backend is a c10d group of its own over gloo, which phalanx knows nothing of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.comm import hooks
from tests.cluster import run_ranks

_STEPS = 5


class LateWork:
    """Writes the result where it belongs when waited for, or when its future completes."""

    def __init__(self, work: Any, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._work, self._outputs, self._results = work, outputs, results
        self._lock = threading.Lock()

    def _deliver(self) -> None:
        with self._lock:
            for output, result in zip(self._outputs, self._results, strict=True):
                output.copy_(result)
            self._outputs = []  # once: what the caller does to it afterwards stays
            self._results = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        future = LateFuture(self._deliver, list(self._outputs))
        self._work.get_future().add_done_callback(future.complete)
        return future


class LateFuture(torch.futures.Future[Any]):
    """Delivers to whoever waits for it or chains to it. Looking at its value, or being told of its end, is neither."""

    def __init__(self, deliver: Callable[[], None], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._deliver, self._outputs = deliver, outputs

    def complete(self, inner: Any) -> None:
        try:
            inner.value()
            self.set_result(self._outputs)
        except Exception as error:
            self.set_exception(error)  # type: ignore[arg-type]

    def wait(self) -> Any:
        value = super().wait()
        self._deliver()
        return value

    def then(self, callback: Callable[[Any], Any]) -> Any:
        def run(future: Any) -> Any:
            self._deliver()
            return callback(future)

        return super().then(run)


class NanUntilWait(dist.ProcessGroup):
    """gloo, with outputs that are NaN from launch to wait."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, world, timeout)
        self._store = store
        # c10d keeps a group's name in its backends.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "nanwait"

    def get_group_store(self) -> dist.Store:
        return self._store

    def _launch(self, outputs: list[torch.Tensor], call: Callable[[list[torch.Tensor]], Any]) -> LateWork:
        results = [output.clone() for output in outputs]
        work = call(results)
        for output in outputs:
            output.fill_(torch.nan if output.dtype.is_floating_point else 111)
        return LateWork(work, outputs, results)

    def allreduce(self, tensors: Any, opts: Any = None) -> LateWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._launch(tensors, lambda results: self._gloo.allreduce(results, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: Any, opts: Any = None) -> LateWork:
        return self._launch(list(tensors), lambda results: self._gloo.broadcast(results, opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LateWork:
        mine = input.clone()  # it may be a slice of the output
        return self._launch([output], lambda results: self._gloo._allgather_base(results[0], mine))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LateWork:
        whole = input.clone().view(self.size(), -1)
        work = self._gloo.allreduce([whole], dist.AllreduceOptions())  # gloo's own reduce-scatter has no future
        output.fill_(torch.nan)
        return LateWork(work, [output], [whole[self.rank()].view(output.shape)])

    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def _make(store: dist.Store, rank: int, world: int, timeout: timedelta) -> NanUntilWait:
    return NanUntilWait(store, rank, world, timeout)


def _group() -> dist.ProcessGroup:
    if not hasattr(dist.Backend, "NANWAIT"):
        dist.Backend.register_backend("nanwait", _make, devices=["cpu"])
    return dist.new_group(backend="nanwait")


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def _alone() -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(_STEPS):
        model(_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def _train(
    rank: int, world: int, ddp_options: dict[str, Any], zero_options: dict[str, Any] | None, hook: Any
) -> list[torch.Tensor]:
    group = _group()
    ddp = phalanx.DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.01, **ddp_options)
    if hook is not None:
        ddp.register_comm_hook(hook[1](group) if hook[1] else group, hook[0])
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizer: Any = sgd(ddp.parameters())
    if zero_options is not None:
        optimizer = phalanx.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9, **zero_options
        )
    for step in range(_STEPS):
        part = _batch(step).chunk(world)[rank]
        ddp(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in ddp.parameters()]
    del ddp, optimizer
    dist.destroy_process_group(group)
    return found


_WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Any, float]] = {
    # Only the order of additions differs from one process: a few units in the last place, over five steps.
    "plain": ({}, None, None, 1e-5),
    "static views": ({"static_graph": True, "gradient_as_bucket_view": True}, None, None, 1e-5),
    "zero alone": ({}, {}, None, 1e-5),
    "zero by parameter": ({}, {"partition": "parameter"}, None, 1e-5),
    "zero overlapped": ({}, {"overlap_with_ddp": True}, None, 1e-5),
    "zero overlapped, stage 2, later": ({}, {"overlap_with_ddp": True, "stage": 2, "step_in_backward": False}, None, 1e-5),
    "hook allreduce": ({}, None, (hooks.allreduce_hook, None), 1e-5),
    # These round or leave out on purpose; NaN would still be seen.
    "hook fp16": ({}, None, (hooks.fp16_compress_hook, None), 1e-2),
    "hook int8": ({}, None, (hooks.int8_hook, hooks.Int8State), 5e-2),
    "hook topk": ({}, None, (hooks.topk_hook, partial(hooks.TopKState, ratio=0.5)), 2e-1),
    "hook powersgd": ({}, None, (hooks.powerSGD_hook, partial(hooks.PowerSGDState, start_powerSGD_iter=2)), 2e-1),
}


@pytest.mark.parametrize("way", _WAYS)
def test_nothing_is_used_before_it_was_waited_for(way: str) -> None:
    ddp_options, zero_options, hook, tolerance = _WAYS[way]
    first, second = run_ranks(2, _train, ddp_options, zero_options, hook)
    for mine, yours, alone in zip(first, second, _alone(), strict=True):
        assert torch.equal(mine, yours)
        torch.testing.assert_close(mine, alone, rtol=0.0, atol=tolerance)


def _forget_to_wait(rank: int, world: int) -> bool:
    group = _group()
    work = dist.all_reduce(mine := torch.ones(4), group=group, async_op=True)
    early = bool(mine.isnan().all())
    work.wait()
    dist.destroy_process_group(group)
    return early and mine.tolist() == [2.0] * 4


def test_the_group_shows_nan_to_whoever_does_not_wait() -> None:
    assert run_ranks(2, _forget_to_wait) == [True, True]
