"""A store that is gone is an error for who asks, and c10d says nothing of its own about it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.comm.failure import answering
from phalanx.comm.failure.answering import AnsweringStore, SilentStoreError


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


class _Stopped:
    """A store whose server does not answer."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return self.goes_on.wait(30)


def test_the_time_limit_is_waited_for_once_however_the_keys_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = _Stopped()
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    whole = AnsweringStore(stopped, may_hang=True, limit_s=0.2)  # type: ignore[arg-type]
    for store in (whole.prefixed("failures"), whole.prefixed("agreements"), whole):
        with pytest.raises(SilentStoreError):
            store.check(["there"])
    assert stopped.num_asked == 1
    stopped.goes_on.set()
