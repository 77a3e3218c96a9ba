"""In a group that is not the whole world, messages name ranks by their numbers in the world, and say which group it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.comm.ranks import ranks_of
from phalanx.comm.torch_backend import collectives_for
from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks

PAIR = "(of the group of ranks 1, 2)"
BACKENDS = ("gloo", "phalanx")


def _in_pair(rank: int, world: int, failing: Callable[[dist.ProcessGroup, int], None]) -> tuple[str, tuple[int, ...]]:
    """What `failing` raises on ranks 1 and 2, on a group of theirs; the others only make it."""
    pair = dist.new_group([1, 2])
    text, ranks = "", ()
    if rank:
        with pytest.raises((MismatchError, PeerFailure)) as caught:
            failing(pair, rank)
        text, ranks = str(caught.value), getattr(caught.value, "ranks", ())
    dist.barrier()
    return text, ranks


def _wraps_otherwise(pair: dist.ProcessGroup, rank: int) -> None:
    phalanx.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pair, gradient_as_bucket_view=rank == 2)


def _optimizes_otherwise(pair: dist.ProcessGroup, rank: int) -> None:
    params = torch.nn.Linear(2, 2).parameters()
    phalanx.ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=pair, lr=0.1 * rank)


def _other_model(pair: dist.ProcessGroup, rank: int) -> None:
    phalanx.DistributedDataParallel(torch.nn.Linear(2, 2 + rank), process_group=pair)


def _saves_otherwise(pair: dist.ProcessGroup, rank: int) -> None:
    with phalanx.Checkpointer("nowhere", torch.nn.Linear(2, 2), process_group=pair, timeout_s=10) as checkpointer:
        checkpointer.restore(step=rank)


ROWS: dict[str, tuple[Callable[[dist.ProcessGroup, int], None], str]] = {
    "arguments": (_wraps_otherwise, "is False on rank 1, True on rank 2"),
    "options": (_optimizes_otherwise, "lr of group 0 is 0.1 on rank 1, 0.2 on rank 2"),
    "models": (_other_model, "rank 1 has 'weight' (shape [3, 2]"),
    "checkpoints": (_saves_otherwise, "called restore(step="),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_what_differs_is_told_by_the_numbers_that_users_know(name: str, backend: str) -> None:
    failing, words = ROWS[name]
    _, *said = run_ranks(3, _in_pair, failing, backend=backend)
    for rank, (text, _) in enumerate(said, start=1):
        assert text.startswith(f"rank {rank} {PAIR}"), text
        assert words in text and "rank 0" not in text, text


def _fails(pair: dist.ProcessGroup, rank: int) -> None:
    collectives = collectives_for(pair)
    if rank == 2:
        error = MismatchError("my own mistake")
        collectives.board.post_error(error)
        raise error
    collectives.wait(collectives.all_reduce(torch.ones(3)), "adding up")


def test_who_failed_first_is_named_and_held_responsible() -> None:
    _, (text, ranks), _ = run_ranks(3, _in_pair, _fails, backend="gloo", allow_leaks=["native_threads"])
    where = "agreeing on the next collective (what to start is all_reduce of 3 x float32)"
    assert text == f"rank 1 {PAIR}: {where}: rank 2 failed first: MismatchError: my own mistake", text
    assert ranks == (2,)


def _named(rank: int, world: int) -> tuple[str, str]:
    first = dist.new_group([0, 1])
    assert dist.group.WORLD is not None
    return ranks_of(dist.group.WORLD).me, ranks_of(first).me if rank < 2 else ""


def test_the_whole_world_is_not_named() -> None:
    for rank, (world, pair) in enumerate(run_ranks(3, _named)):
        assert world == f"rank {rank}"
        assert rank == 2 or pair == f"rank {rank} (of the group of ranks 0, 1)"
