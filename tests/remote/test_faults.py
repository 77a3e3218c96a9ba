"""Owners that die, stall or come too late in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim

import phalanx.remote as remote
from tests.cluster import spawn_ranks
from tests.remote.world import layers_on, run_rpc, through, values_of, weights_of

OWNERS = ["worker1", "worker2", "worker3"]


class Mortal(optim.SGD):
    """Dies on worker2 in the middle of its second step."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        if rpc.get_worker_info().name == "worker2" and self.param_groups[0]["count"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


_DONE = threading.Event()


def finish() -> None:
    # A little later, when this call has been answered.
    threading.Timer(0.2, _DONE.set).start()


def lose_an_owner(rank: int, world: int) -> Any:
    session = remote.init(f"worker{rank}")
    if rank:
        # Served until the caller ends the test, without a graceful shutdown: not all can take part in one.
        while not _DONE.wait(0.01):
            pass
        session.shutdown(graceful=False)
        return None
    layers = layers_on(OWNERS, [(4, 4)] * 3)
    params = weights_of(layers)
    optimizer = remote.DistributedOptimizer(Mortal, params, lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, torch.ones(2, 4)).sum()])
        optimizer.step(context_id)
        before = values_of([layers[0], layers[2]])
        begun = time.monotonic()
        try:
            optimizer.step(context_id, timeout_s=5)
            raise AssertionError("the step went through")
        except remote.StepFailed as error:
            failed, elapsed = error, time.monotonic() - begun
        applied = optimizer.applied_on(failed.step, timeout_s=5)
        # The survivors go on, in an optimizer of their own over the same parameters.
        after = values_of([layers[0], layers[2]])
        assert not any(map(torch.equal, before, after))
        again = remote.DistributedOptimizer(optim.SGD, [params[0], params[2]], lr=0.1)
        timings = again.step(context_id, timeout_s=5)
        assert [timing.num_updated for timing in timings.values()] == [1, 1]
    for worker in ("worker1", "worker3"):
        rpc.rpc_sync(worker, finish)
    session.shutdown(graceful=False)
    return failed, elapsed, applied


def test_an_owner_killed_in_the_middle_of_a_step_is_named_and_the_others_go_on() -> None:
    outcomes = spawn_ranks(4, lose_an_owner, backend=None)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, -signal.SIGKILL, 0], outcomes[0].error_text
    error, elapsed, applied = outcomes[0].value
    assert (error.applied, error.failed, error.unknown) == (("worker1", "worker3"), (), ("worker2",))
    assert "worker2: no answer; it died or cannot be reached" in str(error)
    assert elapsed < 10, "long before the time limit of rpc"
    assert applied == {"worker1": True, "worker2": None, "worker3": True}


def pid_here() -> int:
    return os.getpid()


def stop(pid: int) -> None:
    """Stop a process, all of it: one thread takes the signal when it is scheduled, and the others run on until then."""
    os.kill(pid, signal.SIGSTOP)
    threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
    while any(thread.status() != psutil.STATUS_STOPPED for thread in threads):
        time.sleep(0.001)


def stall_an_owner() -> tuple[remote.StepFailed, float, dict[str, Any], list[bool]]:
    layers = layers_on(OWNERS, [(4, 4)] * 3)
    optimizer = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, torch.ones(2, 4)).sum()])
        optimizer.step(context_id)
        before = values_of(layers)
        pid = rpc.rpc_sync("worker2", pid_here)
        stop(pid)
        begun = time.monotonic()
        try:
            optimizer.step(context_id, timeout_s=1)
            raise AssertionError("the step went through")
        except remote.StepFailed as error:
            failed, elapsed = error, time.monotonic() - begun
        finally:
            os.kill(pid, signal.SIGCONT)
        # Awake again, it finds the step in its mail, and must see that it comes too late.
        applied = optimizer.applied_on(failed.step)
        changed = [not torch.equal(*pair) for pair in zip(before, values_of(layers), strict=True)]
        optimizer.step(context_id)
    return failed, elapsed, applied, changed


def test_a_stalled_owner_is_named_in_time_and_never_applies_the_step_later() -> None:
    error, elapsed, applied, changed = run_rpc(4, stall_an_owner)
    assert (error.applied, error.failed, error.unknown) == (("worker1", "worker3"), (), ("worker2",))
    assert "worker2: no answer within 1 s" in str(error)
    assert 1 <= elapsed < 5
    assert applied == {"worker1": True, "worker2": False, "worker3": True}
    assert changed == [True, False, True]


class Lingering(optim.SGD):
    """Holds the worker's updates up for a while."""

    def step(self, closure: Any = None) -> None:
        time.sleep(2.0)
        super().step()


def wait_for_another_update() -> remote.StepFailed:
    layers = layers_on(["worker1"], [(4, 4)])
    slow = remote.DistributedOptimizer(Lingering, weights_of(layers), lr=0.1)
    quick = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, torch.ones(2, 4)).sum()])
        slow_step = threading.Thread(target=slow.step, args=(context_id,))
        slow_step.start()
        time.sleep(0.7)
        try:
            # The owner gives up a little before the caller does, and can still say so.
            quick.step(context_id, timeout_s=0.3)
            raise AssertionError("the step went through")
        except remote.StepFailed as error:
            failed = error
        slow_step.join()
        assert quick.applied_on(failed.step) == {"worker1": False}
        quick.step(context_id)
    return failed


def test_a_step_that_waits_too_long_for_another_is_not_applied() -> None:
    error = run_rpc(2, wait_for_another_update)
    assert error.applied == () and {*error.failed, *error.unknown} == {"worker1"}


class SlowToMake(optim.SGD):
    """Is still being made when the caller gives up."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        if rpc.get_worker_info().name == "worker1":
            time.sleep(3.0)


def give_up_making() -> tuple[str, list[int]]:
    from phalanx.remote.owner import num_owned

    params = weights_of(layers_on(["worker1", "worker2"], [(4, 4)] * 2))
    for param in params:
        param.confirmed_by_owner() or param.to_here()
    # Enough for the other worker, on a busy machine too.
    rpc._set_rpc_timeout(1.0)
    try:
        remote.DistributedOptimizer(SlowToMake, params)
        raise AssertionError("it was made")
    except remote.WorkersFailed as error:
        text = str(error)
    rpc._set_rpc_timeout(60)
    time.sleep(2.5)
    return text, [rpc.rpc_sync(worker, num_owned) for worker in ("worker1", "worker2")]


def test_an_optimizer_made_too_late_is_not_kept() -> None:
    text, owned = run_rpc(3, give_up_making)
    assert "1 of 2 workers failed" in text and "worker1: no answer within" in text
    assert owned == [0, 0]


def serve_or_die(rank: int, world: int, victim: int, how: str) -> Any:
    """Everybody leaves its session as a user's program does; the victim does not get that far."""
    with remote.init(f"worker{rank}"):
        if rank == 0:
            # Everybody is there: nobody dies while others still start.
            [rpc.rpc_sync(f"worker{other}", pid_here) for other in range(1, world)]
        if rank == victim:
            time.sleep(0.5)
            if how == "raised":
                raise ArithmeticError("the trainer's own")
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("victim", "how"), [(0, "killed"), (1, "killed"), (2, "raised"), (0, "raised")])
def test_workers_end_by_themselves_when_one_of_them_is_no_more(victim: int, how: str) -> None:
    outcomes = spawn_ranks(3, serve_or_die, victim, how, backend=None, timeout_s=40)
    for outcome in outcomes:
        assert not outcome.timed_out, outcome
        if outcome.rank != victim:
            assert outcome.exitcode == 1 and f"worker{victim}" in str(outcome.error_text), outcome
            assert how == "killed" or "the trainer's own" in str(outcome.error_text), outcome
            assert outcome.seconds < 20, outcome
