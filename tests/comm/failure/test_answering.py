"""A store that is gone is an error for who asks, and c10d says nothing of its own about it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.comm.failure import answering
from phalanx.comm.failure.answering import AnsweringStore


def _abandoned() -> dist.TCPStore:
    """A connection to a store whose server has ended."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    client = dist.TCPStore("127.0.0.1", server.port, None, is_master=False, timeout=timedelta(seconds=10))
    client.set("there", "1")
    return client


def test_a_question_to_a_store_that_has_ended_writes_no_stack_of_frames(capfd: pytest.CaptureFixture[str]) -> None:
    store = AnsweringStore(_abandoned(), may_hang=True, limit_s=10)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            store.check(["there"])
    assert capfd.readouterr().err == ""


def test_what_c10d_says_otherwise_is_heard_again_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    with answering.hushed(), answering.hushed(), pytest.raises(RuntimeError):
        _abandoned().check(["there"])
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError):
        _abandoned().check(["there"])
    assert "[c10d]" in capfd.readouterr().err
