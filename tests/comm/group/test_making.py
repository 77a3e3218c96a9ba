"""A rank that ends while a script makes a group of the backend "phalanx" is named by the others, at once."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.failure.board import board_of
from phalanx.comm.group import process_group
from phalanx.errors import PeerFailure
from tests.cluster import reserved_port, run_ranks, spawn_ranks

LIMIT_S = 60
SOON_S = 20  # far below the time limit
# What a rank does one after the other while it makes a group.
MOMENTS = ("agree_on_members", "DeviceBackends", "connect", "forget_members")


def _die_in(moment: str) -> None:
    def die(*_: Any) -> None:
        time.sleep(0.3)  # the others are further than this rank, as far as they can be
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(process_group, moment, die)


def _make(rank: int, world: int, moment: str, where: str, is_later: bool) -> tuple[str, tuple[int, ...], float]:
    """The group is made while rank 1 dies: the world's, or a second one of ranks 1 and 2."""
    place = {"init_method": where, "rank": rank, "world_size": world}
    limit = timedelta(seconds=LIMIT_S)
    if is_later:
        dist.init_process_group("phalanx", timeout=limit, **place)
    if rank == 1:
        _die_in(moment)
    started = time.monotonic()
    try:
        if is_later:
            group = dist.new_group([1, 2], timeout=limit)
            if rank == 0:
                return "", (), 0.0
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.init_process_group("phalanx", timeout=limit, **place)
            dist.all_reduce(torch.ones(1))
    except PeerFailure as error:
        return str(error), error.ranks, time.monotonic() - started
    return "nothing", (), 0.0


def _check(moment: str, where: str, is_later: bool = False) -> None:
    outcomes = spawn_ranks(3, _make, moment, where, is_later, backend=None, timeout_s=90)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (2,) if is_later else (0, 2):
        assert outcomes[rank].exitcode == 0, outcomes[rank].error_text
        text, ranks, seconds = outcomes[rank].value
        # In its own words, or in those of another one who noticed first.
        assert any(f"rank {one}: " in text for one in (0, 2)) and "rank 1 " in text and ranks == (1,), text
        assert seconds < SOON_S, text


@pytest.mark.covering(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("by", ["file", "tcp"])
def test_a_rank_that_dies_while_the_world_is_made_is_named(moment: str, by: str, tmp_path: Path) -> None:
    if by == "file":
        _check(moment, f"file://{tmp_path}/store")
        return
    with reserved_port() as port:
        _check(moment, f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("moment", MOMENTS[:2])
def test_a_rank_that_dies_while_another_group_is_made_is_named(moment: str, tmp_path: Path) -> None:
    _check(moment, f"file://{tmp_path}/store", is_later=True)


def _end_before(rank: int, world: int) -> str:
    board = board_of(dist.group.WORLD)
    dist.barrier()
    if rank == 0:
        board.hear_last_words("ValueError: bad batch")
        return ""
    with pytest.raises(PeerFailure) as raised:
        dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    assert raised.value.ranks == (0,)
    return str(raised.value)


def test_a_rank_that_ends_before_it_comes_to_another_group_is_named_with_its_words() -> None:
    assert "rank 0 failed: ValueError: bad batch" in run_ranks(2, _end_before, backend="phalanx")[1]
