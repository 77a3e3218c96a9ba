"""The notes that ranks leave for each other: numbered, cheap to ask for, and gone without a trace on the shared store."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx.comm.failure.waiter as waiter
import phalanx.comm.failure.waiting as waiting
import phalanx.comm.shm.transport.link as link
from phalanx.comm.failure import last_words
from phalanx.comm.failure.board import board_of
from phalanx.comm.torch_backend import collectives_for
from phalanx.errors import MismatchError
from tests.cluster import run_ranks, spawn_ranks


class Counting:
    """A store that counts the questions it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._store, name)


def _notes(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    board, store = board_of(group), group.get_group_store()
    assert board_of(group) is board, "its numbers are the group's"
    limit = store.timeout
    for number in range(3):
        said = board.exchange("lunch", f"{rank} says {number}", wait_s=5)
        assert said == {other: f"{other} says {number}" for other in range(world)}, "answers of the last time"
        assert board.roll_call("here", wait_s=5).missing == ()
    assert store.timeout == limit, "the store is not ours alone"
    board._store = counting = Counting(board._store)
    assert board.failures() == [] and counting.num_calls == 1
    dist.barrier()
    board.post_failure(f"words of {rank}")
    dist.barrier()
    assert [failure.message for failure in board.failures()] == [f"words of {1 - rank}"]
    dist.barrier()
    board.retract_failure()
    dist.barrier()
    assert board.failures() == []


def _unreadable(rank: int, world: int) -> None:
    board = board_of(dist.group.WORLD)
    store = board.store_for("failures")
    dist.barrier()
    for text in ("{", "3", '{"when": 1}', '{"when": "x", "message": "y"}', '["where", "many"]'):
        for key in ("failed", "waits", "process"):
            store.set(f"{key}/{rank}", text)
        store.set("posted", "1")
        dist.barrier()
        (failure,) = board.failures()
        assert failure.rank == 1 - rank and f"cannot be read: {text}" in failure.message
        assert board.waits() == {} and board.ended([1 - rank]) == [] and board.is_alarmed()
        dist.barrier()
    for key in ("failed", "waits"):
        store.set(f"{key}/{rank}", "")
    dist.barrier()


def test_a_note_that_cannot_be_read_tells_that_its_rank_has_failed() -> None:
    run_ranks(2, _unreadable, backend="gloo")


def test_notes_are_numbered_and_asking_costs_one_question() -> None:
    run_ranks(2, _notes, backend="gloo")


def _say_and_end(rank: int, world: int) -> dict[int, str]:
    board = board_of(dist.group.WORLD)
    check = board._store.check

    def slowly(keys: list[str]) -> bool:
        time.sleep(0.3)
        return check(keys)

    if rank == 1:
        board._store.check = slowly  # type: ignore[method-assign]
    said = board.exchange("settings", f"words of {rank}", wait_s=5)
    if rank == 0:
        os._exit(0)
    return said


def test_who_serves_the_store_does_not_end_before_all_have_read_what_was_said() -> None:
    assert spawn_ranks(2, _say_and_end, backend="phalanx")[1].value == {0: "words of 0", 1: "words of 1"}


def _wait_for_one(rank: int, world: int, backend: str) -> list[str]:
    said: list[str] = []
    before = (waiting.FIRST_S, link.FIRST_S, waiter._NOTE_S, link.say, waiter.say)
    waiting.FIRST_S, link.FIRST_S, waiter._NOTE_S = 1.5, 0.2, 0.5
    link.say = waiter.say = said.append
    try:
        collectives = collectives_for(dist.group.WORLD)  # type: ignore[arg-type]
        for _ in range(2):  # one after the other has to be known too
            collectives.wait(collectives.all_reduce(torch.ones(3)), "warming up")
        if rank == 1:
            time.sleep(4.5)
        collectives.wait(collectives.all_reduce(torch.ones(3)), "adding three ones")
    finally:
        waiting.FIRST_S, link.FIRST_S, waiter._NOTE_S, link.say, waiter.say = before
    return said


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_waiting_is_said_once_with_who_waits_for_whom(backend: str) -> None:
    lines = run_ranks(3, _wait_for_one, backend, backend=backend)
    assert lines[1] == [], "who comes late does not wait"
    for rank in (0, 2):
        assert len(lines[rank]) == 1, lines[rank]
        assert f"rank {rank} waits for rank 1" in lines[rank][0], lines[rank]
        assert ("adding three ones" if backend == "gloo" else "all_reduce") in lines[rank][0]


def _wait_apart(rank: int, world: int) -> str:
    collectives = collectives_for(dist.group.WORLD)  # type: ignore[arg-type]
    return str(collectives.explain_transport(RuntimeError("Timed out"), f"place {rank}"))


def test_at_the_time_limit_it_is_said_where_each_rank_was() -> None:
    for rank, text in enumerate(run_ranks(3, _wait_apart, backend="gloo")):
        assert text.startswith(f"rank {rank}: place {rank}: the ranks wait for each other at different points"), text
        assert "rank 0 was at place 0; rank 1 was at place 1; rank 2 was at place 2" in text


def _end_before_use(rank: int, world: int) -> list[str]:
    board_of(dist.group.WORLD)
    unused = dist.new_group()
    if rank == 1:
        last_words.tell(ValueError("bad batch"))
    dist.barrier()
    return [failure.message for failure in board_of(unused).failures()]


def test_words_reach_those_who_wait_in_a_group_that_the_rank_has_not_used() -> None:
    assert run_ranks(2, _end_before_use, backend="gloo")[0] == ["ValueError: bad batch"]


def _disagree(rank: int, world: int) -> str:
    collectives = collectives_for(dist.group.WORLD)  # type: ignore[arg-type]
    collectives.agree("the menu", {"soup": "hot", "bread": "yes"})
    with pytest.raises(MismatchError) as raised:
        collectives.agree("the menu", {"soup": "hot" if rank else "cold", "bread": "yes"})
    # The group is as good as before.
    collectives.agree("the menu", {"soup": "warm"})
    tensor = torch.ones(3)
    collectives.wait(collectives.all_reduce(tensor), "adding")
    assert tensor.eq(world).all()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_what_ranks_disagree_on_is_named_on_every_rank(backend: str) -> None:
    for rank, text in enumerate(run_ranks(3, _disagree, backend=backend)):
        assert text.startswith(f"rank {rank}: the ranks differ in the menu: soup is cold on rank 0, hot on rank 1, 2."), text


def _not_the_same(rank: int, world: int) -> str:
    collectives = collectives_for(dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(MismatchError) as raised:
        size = 3 if rank else 300_000
        collectives.wait(collectives.all_reduce(torch.ones(size)), "adding")
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_collectives_that_do_not_fit_are_an_error_where_gloo_would_abort(backend: str) -> None:
    for text in run_ranks(3, _not_the_same, backend=backend):
        assert "all_reduce of 300000 x float32" in text and "all_reduce of 3 x float32" in text, text
