"""Ranks that end before there is a group are named by those who wait for them. Ranks are threads, their ends are told."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping

import pytest
import torch.distributed as dist

from phalanx.comm.failure.arrivals import Arrivals
from phalanx.comm.failure.processes import began, identity
from phalanx.errors import CollectiveTimeout, CommunicationError, PeerFailure

SOON_S = 10
LIMIT_S = 60.0


def ended(*gone: int) -> Callable[[Collection[int]], Mapping[int, str]]:
    """A launcher that has seen these ranks end."""
    return lambda ranks: {rank: "ended with exit code 0" for rank in gone if rank in ranks}


def wait_in(store: dist.Store, rank: int, limit_s: float = LIMIT_S, gone: Collection[int] = ()) -> CommunicationError | None:
    try:
        Arrivals(store, (rank, range(3)), limit_s, ended(*gone)).wait()
    except CommunicationError as error:
        return error
    return None


def waited(store: dist.Store, ranks: Collection[int], *gone: int) -> dict[int, CommunicationError | None]:
    said: dict[int, CommunicationError | None] = {}
    threads = [threading.Thread(target=lambda r=rank: said.update({r: wait_in(store, r, gone=gone)})) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return said


def test_ranks_that_all_come_meet() -> None:
    assert waited(dist.HashStore(), range(3)) == {0: None, 1: None, 2: None}


def test_a_rank_that_the_launcher_saw_end_is_named_by_all_others() -> None:
    started = time.monotonic()
    said = waited(dist.HashStore(), (0, 2), 1)
    assert time.monotonic() - started < SOON_S
    for rank, error in said.items():
        assert isinstance(error, PeerFailure) and tuple(error.ranks) == (1,), error
        assert f"rank {rank}: rank 1 ended with exit code 0, before the ranks had met" in str(error)


def lose(store: dist.Store, rank: int) -> None:
    """A rank comes, and its process is no more."""
    come = json.dumps({**identity(), "began": "1"})
    dist.PrefixStore("phalanx/arrivals", store).set(f"come/{rank}", come)


def test_a_rank_that_came_and_ended_is_named() -> None:
    store = dist.HashStore()
    lose(store, 1)
    error = wait_in(store, 0)
    assert isinstance(error, PeerFailure) and tuple(error.ranks) == (1,), error


def test_who_ends_because_of_another_is_not_taken_for_the_cause() -> None:
    store = dist.HashStore()
    assert wait_in(store, 0, gone=(1,)) is not None
    lose(store, 0)  # it has raised, and ended by that
    error = wait_in(store, 2)
    assert error is not None and tuple(error.ranks) == (1,), error


def test_a_rank_that_ends_after_it_has_met_is_missed_by_nobody() -> None:
    store = dist.HashStore()
    arrivals = [Arrivals(store, (rank, range(2)), LIMIT_S) for rank in range(2)]
    arrivals[0].wait()
    arrivals[1].met()
    lose(store, 1)
    assert arrivals[0].last_look() is None


def test_a_rank_that_had_met_and_ended_is_named_to_one_who_could_not_connect() -> None:
    store = dist.HashStore()
    place = dist.PrefixStore("phalanx/arrivals", store)
    with subprocess.Popen(["sleep", "60"]) as other:
        place.set("come/1", json.dumps({**identity(), "pid": other.pid, "began": began(other.pid)}))
        place.set("met/1", "1")
        arrivals = Arrivals(store, (0, range(2)), LIMIT_S)
        arrivals.wait()
        assert arrivals.last_look() is None
        other.kill()
    error = arrivals.last_look()
    assert isinstance(error, PeerFailure) and tuple(error.ranks) == (1,), error
    assert "rank 1 has ended while this rank was still connecting to it" in str(error)


def test_a_rank_of_which_nothing_is_known_is_named_at_the_time_limit() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeout, match="rank 1, 2 did not come to the meeting of the 3 ranks within 1 s"):
        Arrivals(store, (0, range(3)), 1.0).wait()
