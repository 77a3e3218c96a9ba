"""Whom a worker that is done waits for, with processes that are only there to be waited for."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.comm.failure.processes import began, identity
from phalanx.remote import lifeline as lifeline_module
from phalanx.remote.lifeline import Lifeline


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _with(child: subprocess.Popen[bytes]) -> Lifeline:
    other: dict[str, Any] = {**identity(), "name": "trainer", "pid": child.pid, "began": began(child.pid)}
    return Lifeline(dist.HashStore(), 0, [{**identity(), "name": "server"}, other])


def test_one_that_was_stopped_is_not_waited_for_for_ever(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "_STOPPED_S", 0.3)
    lifeline = _with(child)
    child.send_signal(signal.SIGSTOP)
    assert lifeline.wait_for_others() == {"trainer": "has been stopped by a signal for 0.3 s"}


def test_one_that_goes_on_in_time_is_waited_for(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline_module, "_STOPPED_S", 20.0)
    lifeline = _with(child)
    child.send_signal(signal.SIGSTOP)
    later = threading.Timer(0.3, lambda: (child.send_signal(signal.SIGCONT), child.kill()))
    later.start()
    assert lifeline.wait_for_others() == {"trainer": "died"}
    later.join()
