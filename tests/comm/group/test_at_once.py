"""Collectives that are over when they return: in order with those under way, in the caller's thread, named if they fail."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.torch_backend import collectives_for
from phalanx.errors import CommunicationError, MismatchError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


def _in_order(rank: int, world: int, backend: str) -> None:
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=30))
    collectives = collectives_for(group)
    # Behind what is still under way: one that overtook it would add unrelated numbers, or be called a mismatch.
    large, votes = torch.full((500_000,), rank + 1.0), torch.tensor([float(rank)])
    work = collectives.all_reduce(large)
    collectives.all_reduce_now(votes, "voting")
    collectives.barrier("meeting")
    assert votes.item() == sum(range(world))
    collectives.wait(work, "adding up")
    assert torch.equal(large, torch.full((500_000,), float(sum(range(1, world + 1)))))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_votes_and_barriers_keep_the_order_of_what_is_under_way(backend: str) -> None:
    run_ranks(2, _in_order, backend, backend="gloo")


def _without_a_thread(rank: int, world: int) -> None:
    group = dist.new_group(backend="phalanx", timeout=timedelta(seconds=30))
    collectives = collectives_for(group)
    before = threading.active_count()
    for _ in range(3):
        collectives.all_reduce_now(torch.zeros(1), "voting")
        collectives.barrier("meeting")
    assert threading.active_count() == before, "the lane's thread is made for the first work that needs it"
    dist.destroy_process_group(group)


def test_votes_and_barriers_need_no_other_thread() -> None:
    run_ranks(2, _without_a_thread, backend="gloo")


def _told_where(rank: int, world: int) -> None:
    group = dist.new_group(backend="phalanx", timeout=timedelta(seconds=1))
    collectives = collectives_for(group)
    with pytest.raises(MismatchError, match="voting"):
        collectives.all_reduce_now(torch.zeros(1 + rank), "voting")
    if rank == 0:
        with pytest.raises(CommunicationError, match=r"meeting: rank 0: barrier timed out.*rank 1"):
            collectives.barrier("meeting")
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_failure_says_what_was_waited_for() -> None:
    run_ranks(2, _told_where, backend="gloo")
