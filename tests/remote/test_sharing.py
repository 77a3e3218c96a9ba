"""Several callers on the same owners: no update is lost or torn, owners run in parallel, the GIL is free."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, optim

import phalanx.remote as remote
from phalanx.remote.owner import num_owned
from tests.cluster import spawn_ranks
from tests.remote.world import checked, layers_on, run_rpc, through, values_of, weights_of

NUM_TRAINERS, NUM_STEPS = 3, 8
_PARAMS: list[Tensor] = [torch.zeros(50, requires_grad=True) for _ in range(5)]


class Slow(optim.SGD):
    """Reads, waits and writes: two at a time would lose an update."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    value = param - group["lr"] * param.grad
                    time.sleep(1e-4)
                    param.copy_(value)


def params_here() -> list[Any]:
    return [rpc.RRef(param) for param in _PARAMS]


def forward_here() -> Tensor:
    return torch.stack([param.sum() for param in _PARAMS]).sum()


def param_values() -> list[Tensor]:
    return [param.detach().clone() for param in _PARAMS]


def be_trainer_or_owner(rank: int, world: int, kind: Any) -> list[Tensor] | None:
    """Every trainer makes its own optimizer over the parameters of the last two ranks."""
    with remote.init(f"worker{rank}"):
        owners = [f"worker{world - 2}", f"worker{world - 1}"]
        if rank < NUM_TRAINERS:
            params = [rref for owner in owners for rref in rpc.rpc_sync(owner, params_here)]
            optimizer = remote.DistributedOptimizer(kind, params, lr=1.0)
            for _ in range(NUM_STEPS):
                with dist_autograd.context() as context_id:
                    losses = [rpc.rpc_sync(owner, forward_here) for owner in owners]
                    dist_autograd.backward(context_id, [torch.stack(losses).sum()])
                    optimizer.step(context_id)
    return param_values() if rank >= NUM_TRAINERS else None


def count_updates(kind: Any) -> None:
    values = checked(spawn_ranks(NUM_TRAINERS + 2, be_trainer_or_owner, kind, backend=None))
    for owner in values[NUM_TRAINERS:]:
        # All gradients are ones and the rate is 1: every element counts the updates it has seen.
        assert all(torch.equal(value, torch.full((50,), -float(NUM_TRAINERS * NUM_STEPS))) for value in owner)


def test_no_update_is_lost_when_trainers_step_at_once() -> None:
    count_updates(Slow)


def test_no_update_is_lost_on_the_fast_path() -> None:
    count_updates(optim.SGD)


_INTERVALS: list[tuple[float, float]] = []


class Recorded(optim.SGD):
    """Takes a while, and writes down when."""

    def step(self, closure: Any = None) -> None:
        begun = time.monotonic()
        time.sleep(0.5)
        super().step()
        _INTERVALS.append((begun, time.monotonic()))


def intervals() -> list[tuple[float, float]]:
    return list(_INTERVALS)


def step_in_parallel() -> list[list[tuple[float, float]]]:
    layers = layers_on(["worker1", "worker2"], [(4, 4), (4, 4)])
    optimizers = [remote.DistributedOptimizer(Recorded, weights_of(layers), lr=0.1) for _ in range(2)]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, torch.ones(2, 4)).sum()])
        steps = [threading.Thread(target=optimizer.step, args=(context_id,)) for optimizer in optimizers]
        for step in steps:
            step.start()
        for step in steps:
            step.join()
    return [sorted(rpc.rpc_sync(worker, intervals)) for worker in ("worker1", "worker2")]


def test_one_owner_updates_one_after_the_other_and_two_owners_in_parallel() -> None:
    first, second = run_rpc(3, step_in_parallel)
    for (_, ended), (begun, _) in (first, second):
        assert ended <= begun
    # One host, one clock: the first updates of the two owners overlap.
    assert max(first[0][0], second[0][0]) < min(first[0][1], second[0][1])


class Big:
    """A parameter whose update takes long enough to look at."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1 << 23, requires_grad=True)
        self.ticks: list[float] = []

    def forward(self) -> Tensor:
        return self.weight.sum()

    def param(self) -> Tensor:
        return self.weight

    def tick(self, seconds: float) -> None:
        """Write down the time again and again, as only a thread that gets the GIL can."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.ticks.append(time.monotonic())
            time.sleep(1e-4)

    def longest_gap(self) -> tuple[float, int]:
        gaps = [later - earlier for earlier, later in zip(self.ticks, self.ticks[1:], strict=False)]
        return max(gaps), len(gaps)


def tick_during_an_update() -> tuple[float, float]:
    big = rpc.remote("worker1", Big)
    optimizer = remote.DistributedOptimizer(optim.Adam, [big.remote().param()], foreach=True)
    longest = 0.0
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [big.rpc_sync().forward()])
        ticking = big.rpc_async(timeout=0).tick(1.5)
        while not ticking.done():
            longest = max(longest, optimizer.step(context_id)["worker1"].update_s)
        ticking.wait()
    gap, _ = big.rpc_sync().longest_gap()
    return gap, longest


@pytest.mark.thorough
@pytest.mark.quiet  # a thread that waits for a processor looks like one that waits for the GIL
def test_the_gil_is_free_during_the_arithmetic() -> None:
    gap, update_s = run_rpc(2, tick_during_an_update)
    # Were the GIL held for the update, no tick could fall into it. A single kernel is a tenth of it.
    assert gap < 0.7 * update_s, (gap, update_s)


def num_owned_soon(worker: str, expected: int) -> int:
    deadline = time.monotonic() + 10
    while (found := rpc.rpc_sync(worker, num_owned)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def come_and_go() -> None:
    params = weights_of(layers_on(["worker0", "worker1"], [(4, 4), (4, 4)]))
    for close in (True, False):
        optimizer = remote.DistributedOptimizer(optim.Adam, params)
        assert [rpc.rpc_sync(worker, num_owned) for worker in ("worker0", "worker1")] == [1, 1]
        if close:
            optimizer.close()
        del optimizer
        gc.collect()
        assert [num_owned_soon(worker, 0) for worker in ("worker0", "worker1")] == [0, 0]


def test_owners_let_go_when_the_caller_does() -> None:
    run_rpc(2, come_and_go)


def leave_open(rank: int, world: int) -> int:
    held: list[Any] = []
    with remote.init(f"worker{rank}"):
        if rank == 0:
            held.append(remote.DistributedOptimizer(optim.Adam, weights_of(layers_on(["worker1"], [(4, 4)]))))
            assert rpc.rpc_sync("worker1", num_owned) == 1
    gc.collect()
    return num_owned()


def test_owners_let_go_when_rpc_shuts_down() -> None:
    assert checked(spawn_ranks(2, leave_open, backend=None)) == [0, 0]


def step_from_threads() -> Tensor:
    layers = layers_on(["worker1"], [(4, 4)])
    optimizer = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=1.0)
    before = values_of(layers)[0]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [layers[0].rpc_sync().forward(torch.zeros(2, 4)).sum()])
        threads = [threading.Thread(target=optimizer.step, args=(context_id,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert optimizer.applied_on(8) == {"worker1": True}
        assert optimizer.applied_on(9) == {"worker1": False}
    return values_of(layers)[0] - before


def test_one_optimizer_may_be_used_by_several_threads() -> None:
    # tanh(0) has the slope 1 and the input is zero: the gradients are zero, and every step still counts.
    assert torch.equal(run_rpc(2, step_from_threads), torch.zeros(4, 4))
