"""What `Collectives.wait` makes of a failure, and what it costs those who never wait."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.torch_backend import TorchCollectives, collectives_for
from phalanx.errors import CommunicationError, MismatchError, PeerFailure
from tests.cluster import run_ranks


class FailedWork:
    """A collective that ended with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> Any:
        raise self._error

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        raise self._error


def _says_where(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    collectives = TorchCollectives(dist.group.WORLD)
    with pytest.raises(CommunicationError, match=r"packing bucket 3: .*every rank answers: broken pipe"):
        collectives.wait(FailedWork(RuntimeError("broken pipe")), "packing bucket 3")


def _keeps_ranks(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    collectives = collectives_for(dist.group.WORLD)
    with pytest.raises(PeerFailure, match="packing bucket 3: rank 1 died") as caught:
        collectives.wait(FailedWork(PeerFailure("rank 1 died", [1])), "packing bucket 3")
    assert caught.value.ranks == (1,)


def test_an_error_says_where_and_keeps_its_ranks() -> None:
    run_ranks(1, _says_where, backend="gloo")
    run_ranks(1, _keeps_ranks, backend="phalanx")


def _one_board(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    collectives = collectives_for(dist.group.WORLD)
    assert collectives.board is collectives.board
    collectives.wait(collectives.all_reduce(torch.ones(1)), "adding")
    gone = weakref.ref(collectives)
    gc.disable()
    try:
        del collectives
        assert gone() is None, "the waiter and the board must not refer back"
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_collectives_have_one_board_and_are_freed_with_their_last_user(backend: str) -> None:
    run_ranks(1, _one_board, backend=backend)


def _breaks(rank: int, world: int) -> tuple[str, tuple[int, ...]]:
    """A hook's future of a collective for which rank 1 does not come: it breaks the group."""
    assert dist.group.WORLD is not None
    group: Any = dist.new_group([0, 1])
    collectives = collectives_for(group)
    dist.barrier(group)
    if rank == 1:
        group.abort()
        return "", (1,)
    work = collectives.all_reduce(torch.ones(4))
    future = work.get_future().then(lambda done: done.value())
    with pytest.raises(CommunicationError) as caught:
        collectives.wait_future(future, "bucket 3, hook mine")
    return str(caught.value), caught.value.ranks


def test_a_failure_seen_through_the_future_of_a_hook_keeps_its_ranks() -> None:
    (words, ranks), _ = run_ranks(2, _breaks, backend="phalanx")
    assert words.startswith(("bucket 3, hook mine: rank 0: ", "rank 0: bucket 3, hook mine: rank 1 "))
    assert ranks == (1,) and "at fault" not in words


def _integers(rank: int, world: int) -> None:
    collectives = collectives_for(dist.group.WORLD)
    with pytest.raises(MismatchError, match="all_reduce of 4 x int64 on rank 0, all_reduce of 6 x int64 on rank 1"):
        collectives.all_reduce(torch.ones(4 + 2 * rank, dtype=torch.int64))


def test_whole_numbers_are_compared_before_they_are_given_to_gloo() -> None:
    run_ranks(2, _integers, backend="gloo")
