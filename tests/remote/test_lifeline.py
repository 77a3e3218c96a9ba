"""Whom a worker that is done waits for, with processes that are only there to be waited for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
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


_SERVE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], dist.TCPStore]]:
    process = subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    yield process, dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    process.kill()
    process.wait()
    process.stdout.close()


def _beside(process: subprocess.Popen[str], store: dist.TCPStore, host: str | None = None) -> Lifeline:
    there: dict[str, Any] = {**identity(), "name": "trainer", "pid": process.pid, "began": began(process.pid)}
    return Lifeline(store, 1, [{**there, "host": host or there["host"]}, {**identity(), "name": "server"}])


def test_one_that_was_stopped_and_serves_the_store_is_not_waited_for_for_ever(
    server: tuple[subprocess.Popen[str], dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "_STOPPED_S", 0.5)
    lifeline = _beside(*server)
    server[0].send_signal(signal.SIGSTOP)
    assert lifeline.wait_for_others() == {"trainer": "has been stopped by a signal for 0.5 s"}
    lifeline.close(badly=True)


def test_one_on_another_host_that_is_stopped_and_serves_the_store_is_not_either(
    server: tuple[subprocess.Popen[str], dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "_STOPPED_S", 0.5)
    lifeline = _beside(*server, host="elsewhere")
    server[0].send_signal(signal.SIGSTOP)
    assert lifeline.wait_for_others() == {"trainer": "has not answered for 0.5 s, and serves the store"}
    lifeline.close(badly=True)
    server[0].send_signal(signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name in ("phalanx-store", "phalanx-lifeline-1"):
            thread.join()  # it was left in its question
