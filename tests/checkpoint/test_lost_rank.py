"""A rank that ends before it comes to a save is named by the others at once; who gives up waiting blames nobody who came."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.checkpoint.agreement import Agreement
from phalanx.comm.failure.answering import AnsweringStore
from phalanx.comm.failure.board import Roll
from phalanx.comm.ranks import Ranks
from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks, spawn_ranks

SOON_S = 20


def _save(rank: int, world: int, folder: Path, how: str) -> tuple[str, tuple[int, ...], float]:
    with phalanx.Checkpointer(str(folder), torch.nn.Linear(2, 2), timeout_s=60) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        dist.barrier()
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise ValueError("no data left")
        started = time.monotonic()
        try:
            checkpointer.save(2)
        except PeerFailure as error:
            return str(error), error.ranks, time.monotonic() - started
        return "nothing", (), 0.0


@pytest.mark.parametrize(("backend", "how"), [("gloo", "kill"), ("phalanx", "kill"), ("gloo", "raise")])
def test_a_rank_that_ends_before_a_save_is_named_by_the_others(backend: str, how: str, tmp_path: Path) -> None:
    outcomes = spawn_ranks(3, _save, tmp_path / "saves", how, backend=backend, timeout_s=90)
    for rank in (0, 2):
        assert outcomes[rank].exitcode == 0, outcomes[rank].error_text
        text, ranks, seconds = outcomes[rank].value
        assert text.startswith(f"rank {rank}: save(step=2): rank 1 ") and ranks == (1,), text
        assert seconds < SOON_S


def _gives_up(rank: int, world: int) -> str:
    assert dist.group.WORLD is not None
    agreement = Agreement(dist.group.WORLD, timeout_s=1.0 if rank else 1.5)
    text = ""
    if rank != 1:
        with pytest.raises(MismatchError) as caught:
            agreement.exchange({}, "save(step=1)")
        text = str(caught.value)
    dist.barrier()
    assert len(agreement.exchange({"rank": rank}, "save(step=2)")) == world, "the next round has the same number"
    return text


def test_ranks_that_give_up_one_after_the_other_do_not_blame_each_other() -> None:
    for text in run_ranks(3, _gives_up)[::2]:
        assert "was not called by ranks [1] within" in text


def test_a_store_that_ended_with_its_rank_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a launcher rank 0 serves the store: what c10d says of its end names nobody."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, is_master=False)
    del server
    agreement = Agreement(None, 30.0)
    agreement.world, agreement.ranks = 2, Ranks((0, 1), 1, "rank 1")
    agreement._store = AnsweringStore(client, may_hang=True, limit_s=10)
    agreement._board = mock.Mock(me="rank 1", timeout_s=10.0)
    agreement._board.failures.return_value, agreement._board.interruption.return_value = [], None
    agreement._board.roll_call.return_value = Roll((0,), {1: "save(step=1)"})
    with pytest.raises(PeerFailure, match=r"^rank 1: save\(step=1\): rank 0 died") as caught:
        agreement.exchange({}, "save(step=1)")
    assert caught.value.ranks == (0,)
    assert capfd.readouterr().err == ""
