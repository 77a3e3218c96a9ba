"""A generation's process group: made in spite of attempts that failed, with the time limit that was asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.comm.failure import interruption
from phalanx.comm.failure.board import group_timeout_s
from phalanx.comm.failure.interruption import InterruptibleStore, interruptible
from phalanx.comm.failure.log_store import LogStore
from phalanx.errors import CommunicationError, PeerFailure
from phalanx.launch.elastic.group import make_group
from tests.cluster import run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(120)

SOON_S = 6


class Broken:
    """An interruption, after so many questions."""

    def __init__(self, after: int) -> None:
        self._left = after

    def error(self) -> CommunicationError | None:
        self._left -= 1
        return PeerFailure("rank 1 is no more", [1]) if self._left < 0 else None


class Whole:
    def error(self) -> CommunicationError | None:
        return None


def _make_after_failures(rank: int, world: int, folder: str, backend: str) -> float:
    cpu = torch.device("cpu")
    if rank == 0:
        # The other rank comes to the store and dies there, before it connects.
        with pytest.raises(PeerFailure, match="no more"):
            make_group(backend, cpu, (0, 2), f"{folder}/half", Broken(after=40), 20.0)
        assert not dist.is_initialized()
    begun = time.monotonic()
    store = make_group(backend, cpu, (rank, world), f"{folder}/whole", Whole(), 20.0)
    try:
        said = torch.tensor([rank + 1.0])
        dist.all_reduce(said)
        assert said.item() == 3.0
        assert dist.group.WORLD is not None and group_timeout_s(dist.group.WORLD) == 20.0
        return time.monotonic() - begun
    finally:
        dist.destroy_process_group()
        del store


def _connect_to_the_dead(rank: int, world: int, path: str, mine: int) -> float:
    """The other rank tells where it is to be found, and dies before it is; as rank `mine` one waits to be connected to, or
    connects."""
    child = os.fork()
    if child == 0:
        store = InterruptibleStore(_DyingStore(path, Whole()), Whole())
        dist.ProcessGroupGloo(store, 1 - mine, 2, timeout=timedelta(seconds=30))
        os._exit(0)
    alarm = Alarm()
    threading.Thread(target=alarm.wait_for, args=(child,), daemon=True).start()
    store = InterruptibleStore(LogStore(path, alarm), alarm)
    begun = time.monotonic()
    # gloo itself may notice that nobody listens at the address; then nobody has to end it.
    with contextlib.suppress(PeerFailure, RuntimeError):
        interruptible(lambda: dist.ProcessGroupGloo(store, mine, 2, timeout=timedelta(seconds=30)), alarm)
    while alarm.code is None and time.monotonic() < begun + 30:
        time.sleep(0.01)
    assert alarm.code == -signal.SIGKILL
    return time.monotonic() - begun


class _DyingStore(LogStore):
    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, value)
        os.kill(os.getpid(), signal.SIGKILL)


class Alarm:
    """Raised when a process has ended."""

    def __init__(self) -> None:
        self.code: int | None = None

    def wait_for(self, child: int) -> None:
        self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def error(self) -> CommunicationError | None:
        return None if self.code is None else PeerFailure("rank 1 is no more", [1])


@pytest.mark.parametrize("mine", [0, 1])
def test_gloo_does_not_wait_for_one_that_died_before_it_connected(mine: int, tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    # The thread that is left behind in gloo is what this costs.
    leaks = ["threads", "native_threads"]
    (seconds,) = run_ranks(1, _connect_to_the_dead, str(tmp_path / "store"), mine, backend=None, allow_leaks=leaks)
    assert seconds < 10.0


def test_what_was_given_up_comes_to_nothing_when_it_returns() -> None:
    come, reached = threading.Event(), []

    def make() -> None:
        come.wait(20)
        reached.append("made")

    with pytest.raises(PeerFailure, match="no more"):
        interruptible(make, Broken(after=0))
    come.set()
    for thread in threading.enumerate():
        if thread.name == "phalanx-joining":
            thread.join(20)
    assert not reached


def test_a_thread_that_is_given_up_past_all_handlers_ends_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    begun, pause = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        while not pause.wait(0.001):
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(10)
    interruption._give_up(thread)
    thread.join(10)
    assert not thread.is_alive() and not capsys.readouterr().err


def test_what_fails_by_itself_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no such backend")

    with pytest.raises(ValueError, match="no such backend"):
        interruptible(fail, Whole())


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_failed_before_finds_the_others(backend: str, tmp_path: Path) -> None:
    for name in ("half", "whole"):
        (tmp_path / name).touch()
    # What the dead rank has left in the store: it was there.
    LogStore(str(tmp_path / "half"), Whole()).set("phalanx/here/1", "1")
    run_ranks(2, _make_after_failures, str(tmp_path), backend, backend=None)


def parted(rank: int, world: int) -> float:
    worker = phalanx.init()
    wrapped = phalanx.DistributedDataParallel(torch.nn.Linear(2, 2))
    if rank == 0:
        worker.part()
        time.sleep(2 * SOON_S)
        os._exit(len(list(wrapped.parameters())))  # until here a wrapper has held the group
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        worker.exchange.all_objects(rank)
    return time.monotonic() - started


def test_who_waits_for_a_rank_that_parts_is_told_by_the_connection() -> None:
    outcomes = spawn_ranks(2, parted, pg_timeout_s=60)
    assert outcomes[0].exitcode == 2, "it parted, and stayed"
    assert outcomes[1].value < SOON_S
