"""A lane's works by themselves, without a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from phalanx.comm.group.direct import _call
from phalanx.comm.group.lane import Lane, LaneWork
from phalanx.comm.shm.transport.call import Verb
from phalanx.ddp.buckets.dense import references


class _Nothing:
    rank, world, global_rank = 0, 2, 0

    def run(self, call: object) -> None: ...


class _Looks(threading.Event):
    """Counts who holds the memory of a tensor in the moment it is set."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.seen = -1

    def set(self) -> None:
        self.seen = references(self.tensor)
        super().set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_work_that_is_over_holds_no_memory(dtype: torch.dtype) -> None:
    # Else a bucket takes other memory, as if the user had kept a gradient, whenever the lane's thread has to wait for a
    # core before its last line; and after three such times it gives out copies for ever.
    bucket = torch.zeros(1 << 10, dtype=dtype)
    before = references(bucket)
    work = LaneWork(Lane(_Nothing(), lambda: timedelta(seconds=5)), [_call(Verb.ALL_REDUCE, bucket)])  # type: ignore[arg-type]
    done = work._done = _Looks(bucket)
    work.perform()
    assert done.seen == before


class _Counts(_Nothing):
    """Operations that note what was asked of them, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, int]] = []

    def run(self, call: object) -> None:
        self.calls.append((call, threading.get_ident()))

    def leave(self, reason: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def operations() -> _Counts:
    return _Counts()


@pytest.fixture
def lane(operations: _Counts) -> Iterator[Lane]:
    lane = Lane(operations, lambda: timedelta(seconds=5))  # type: ignore[arg-type]
    yield lane
    lane.close()


def _reduction() -> list[Any]:
    return [_call(Verb.ALL_REDUCE, torch.zeros(8))]


def test_what_is_waited_for_next_needs_no_other_thread(lane: Lane, operations: _Counts) -> None:
    work = lane.submit(_reduction(), waits_next=True)
    assert not work.is_completed()
    work.wait()
    assert [thread for _, thread in operations.calls] == [threading.get_ident()]
    assert lane._thread is None


def _in_inference_mode(work: Any) -> None:
    with torch.inference_mode():
        work.wait()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait", [_in_inference_mode, lambda work: work.wait(timedelta(seconds=20))], ids=["mode", "limit"])
def test_what_was_to_be_waited_for_next_runs_where_the_waiting_thread_may_not(
    lane: Lane, operations: _Counts, wait: Callable[[Any], None]
) -> None:
    works = [lane.submit(_reduction(), waits_next=True) for _ in range(2)]
    wait(works[1])
    assert len(operations.calls) == 2


@pytest.mark.timeout(30)
def test_what_comes_after_it_waits_for_it(lane: Lane, operations: _Counts) -> None:
    first, second = _reduction(), _reduction()
    lane.submit(first, waits_next=True)
    lane.submit(second).wait(timedelta(seconds=20))
    assert [call for call, _ in operations.calls] == [*first, *second]
