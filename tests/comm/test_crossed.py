"""Ranks that come together on different groups are told so, and do not wait for each other."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks


def make(what: str, group: dist.ProcessGroup | None) -> tuple[str, float]:
    """Wrap a model or make an optimizer on the group; the error that it was, and after how many seconds."""
    net, started = torch.nn.Linear(4, 4), time.monotonic()
    try:
        if what == "wrapper":
            phalanx.DistributedDataParallel(net, process_group=group)
        else:
            phalanx.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    except (MismatchError, PeerFailure) as error:
        return str(error), time.monotonic() - started
    return "nothing", 0.0


def crossed(rank: int, world: int, what: str) -> tuple[str, float]:
    group = dist.new_group(range(world))
    return make(what, group if rank == 1 else None)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("what", ["wrapper", "optimizer"])
def test_groups_of_the_same_members_that_are_crossed_are_an_error_on_every_rank(backend: str, what: str) -> None:
    for text, seconds in run_ranks(3, crossed, what, backend=backend):
        assert "the ranks differ in the process group for" in text, text
        assert "the default group on rank" in text and "the group '" in text and "on rank 1" in text, text
        assert seconds < 15


def overlapping(rank: int, world: int, what: str, order: str) -> tuple[str, float]:
    """Rank 1 comes to a group of some of the ranks, before the others come to that of all, or after them."""
    group = dist.new_group([0, 1])
    time.sleep({"at once": 0, "first": 0.3 * (rank != 1), "last": 0.3 * (rank == 1), "third": 0.3 * (2 - rank)}[order])
    return make(what, group if rank == 1 else None)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    ("what", "order"), [("wrapper", "at once"), ("wrapper", "first"), ("optimizer", "last"), ("wrapper", "third")]
)
def test_groups_of_other_members_are_an_error_on_every_rank(backend: str, what: str, order: str) -> None:
    for text, seconds in run_ranks(3, overlapping, what, order, backend=backend):
        assert "the ranks differ in the process group for" in text, text
        assert "the default group on rank" in text and "the group '" in text and "rank 1" in text, text
        assert seconds < 15


def several(rank: int, world: int) -> int:
    """As many groups as one likes, in one order: also of one member, and of some of the ranks, some of whom come late."""
    made = [dist.new_group(ranks) for ranks in (range(world), [0, 1], [1, 2])]
    made.append(dist.new_group([rank], use_local_synchronization=True))
    mine = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0]
    for number, group in enumerate([*mine, None, *mine, *mine, None]):
        time.sleep(0.05 * ((number + rank) % 3))
        wrapped = phalanx.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
        wrapped(torch.ones(1, 4)).sum().backward()
    return len(mine)


def test_several_groups_in_one_order_are_no_mistake() -> None:
    assert run_ranks(3, several, backend="gloo") == [3, 4, 3]
