"""Ranks that make a process group of other members are told so, before anybody waits for the others."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.group.members import agree_on_members, forget_members
from phalanx.errors import CollectiveTimeout, MismatchError
from tests.cluster import spawn_ranks

SOON_S = 12


def _make_apart(rank: int, world: int) -> tuple[str, float]:
    # One that fits first: numbers of ranks in the world are not those in the group.
    pair = dist.new_group([1, 2])
    if rank:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=pair)
        assert ones.eq(2).all()
    started = time.monotonic()
    try:
        dist.new_group([0, 1] if rank == 1 else [0, 1, 2])
    except MismatchError as error:
        return str(error), time.monotonic() - started
    return "nothing", time.monotonic() - started


def test_groups_of_other_members_are_an_error_on_every_rank() -> None:
    outcomes = spawn_ranks(3, _make_apart, backend="phalanx", pg_timeout_s=60, timeout_s=90)
    for rank, outcome in enumerate(outcomes):
        text, seconds = outcome.value
        assert f"rank {rank}: the ranks make different process groups" in text and seconds < SOON_S, text
        assert "[0, 1]" in text and "[0, 1, 2]" in text and "on rank 1" in text, text


def test_a_member_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeout, match=r"rank 3, 5 did not come to make a process group of ranks \[1, 3, 5\]"):
        agree_on_members(store, 1, [1, 3, 5], timedelta(seconds=0.2))


def test_what_was_said_of_an_earlier_group_is_not_read() -> None:
    store = dist.HashStore()
    store.set("phalanx/members/1", "[0, 1]")
    agree_on_members(store, 0, [0, 1], timedelta(seconds=1))
    for rank in range(2):
        forget_members(store, rank)
    with pytest.raises(CollectiveTimeout):
        agree_on_members(store, 0, [0, 1, 2], timedelta(seconds=0.2))
