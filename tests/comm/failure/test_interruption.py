"""Waiting that is ended from outside: in the store, in an agreement, in a rendezvous, and in gloo's own connecting."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.comm.failure.agreement import StoreAgreement
from phalanx.comm.failure.board import FailureBoard
from phalanx.comm.failure.interruption import InterruptibleStore
from phalanx.comm.failure.log_store import LogStore
from phalanx.comm.failure.waiter import Waiter
from phalanx.comm.shm.transport.rendezvous import Rendezvous
from phalanx.errors import CommunicationError, PeerFailure

pytestmark = pytest.mark.timeout(60)

LIMIT = timedelta(seconds=20)  # whatever takes as long was not interrupted


class Alarm:
    """An interruption that a test raises."""

    def __init__(self) -> None:
        self.raised: CommunicationError | None = None

    def error(self) -> CommunicationError | None:
        return self.raised

    def after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.__setattr__, ("raised", PeerFailure("rank 0: rank 1 is no more", [1])))
        timer.start()
        return timer


@pytest.fixture
def alarm() -> Alarm:
    return Alarm()


@pytest.fixture
def store(alarm: Alarm, tmp_path: Path) -> InterruptibleStore:
    (tmp_path / "store").touch()
    return InterruptibleStore(LogStore(str(tmp_path / "store"), alarm), alarm)


def _ends(alarm: Alarm, waits: Callable[[], Any]) -> PeerFailure:
    """What the wait raises, soon after the alarm."""
    begun, timer = time.monotonic(), alarm.after(0.1)
    with pytest.raises(PeerFailure) as caught:
        waits()
    timer.join()
    seconds = time.monotonic() - begun
    assert 0.09 < seconds < 5.0, f"it took {seconds} s"
    return caught.value


class _Group:
    """As much of a process group as a board asks for."""

    def __init__(self, store: dist.Store, world: int) -> None:
        self._store, self._world = store, world
        self._device_types: list[Any] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._world

    def get_group_store(self) -> dist.Store:
        return self._store


def _board(store: dist.Store, world: int) -> FailureBoard:
    return FailureBoard(_Group(store, world))  # type: ignore[arg-type]


def test_it_is_the_other_store_as_long_as_nobody_interrupts(store: InterruptibleStore) -> None:
    prefixed = dist.PrefixStore("a", store)  # as c10d uses it: through C++
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value" and prefixed.multi_get(["key", "key"]) == [b"value", b"value"]
    assert prefixed.check(["key"]) and not prefixed.check(["key", "other"])
    assert prefixed.add("count", 2) == 2 and prefixed.add("count", 3) == 5
    assert prefixed.compare_set("key", "value", "new") == b"new"
    before = prefixed.num_keys()
    assert prefixed.delete_key("key") and prefixed.num_keys() == before - 1
    with pytest.raises(dist.DistStoreError, match="no rank has set"):
        prefixed.wait(["never"], timedelta(seconds=0.05))


@pytest.mark.parametrize("how", ["wait", "get", "multi_get"])
def test_a_wait_in_the_store_is_interrupted(how: str, store: InterruptibleStore, alarm: Alarm) -> None:
    prefixed = dist.PrefixStore("a", store)
    never: Any = "never" if how == "get" else ["never"]
    error = _ends(alarm, lambda: getattr(prefixed, how)(never))
    assert error.ranks == (1,)
    # And nothing is begun any more.
    with pytest.raises(PeerFailure, match="no more"):
        prefixed.set("key", "value")


def test_gloo_that_connects_is_interrupted(store: InterruptibleStore, alarm: Alarm) -> None:
    _ends(alarm, lambda: dist.ProcessGroupGloo(dist.PrefixStore("g", store), 0, 2, timeout=LIMIT))


def test_an_agreement_is_interrupted(store: InterruptibleStore, alarm: Alarm) -> None:
    board = _board(store, 2)

    def fail(where: str, silent: bool) -> CommunicationError:
        return CommunicationError(f"asked others at {where}")

    _ends(alarm, lambda: StoreAgreement(board).agree("the settings", {"a": "b"}, fail))


def test_ranks_that_meet_are_interrupted(store: InterruptibleStore, alarm: Alarm) -> None:
    """Rank 1 has told its address, and dies before it connects."""
    prefixed = dist.PrefixStore("r", store)
    other = Rendezvous(prefixed, 1, range(2), LIMIT)
    mine = Rendezvous(prefixed, 0, range(2), LIMIT)
    announced = threading.Thread(target=other.announce, args=("host",))
    announced.start()
    mine.announce("host")
    announced.join()
    other.close()
    try:
        _ends(alarm, lambda: mine.meet([0, 1], None, None))  # type: ignore[arg-type]
    finally:
        mine.close()


def test_one_who_ends_amid_the_rendezvous_is_a_lost_peer(store: InterruptibleStore) -> None:
    """Rank 0 listens, and dies with rank 1 in its queue: no stranger, but the end of a rank."""
    prefixed = dist.PrefixStore("r", store)
    listening, mine = Rendezvous(prefixed, 0, range(2), LIMIT), Rendezvous(prefixed, 1, range(2), LIMIT)
    announced = threading.Thread(target=listening.announce, args=("host",))
    announced.start()
    mine.announce("host")
    announced.join()
    timer = threading.Timer(0.1, listening.close)
    timer.start()
    try:
        with pytest.raises((PeerFailure, ConnectionError)):
            mine.meet([0, 1], *_arenas())
    finally:
        mine.close()
        timer.join()


def _arenas() -> tuple[Any, Any]:
    from phalanx.comm.memory.segment import process_memory
    from phalanx.comm.shm.transport.team import ControlBlock

    return ControlBlock().arena, process_memory()


def test_the_one_who_interrupts_is_believed_before_a_roll_is_called(store: InterruptibleStore, alarm: Alarm) -> None:
    """Otherwise the dead would have two seconds to answer."""
    board = _board(store, 3)
    timer, begun = alarm.after(0.1), time.monotonic()
    error = Waiter(board).explain(RuntimeError("Connection closed by peer"), "bucket 2", False)
    timer.join()
    assert isinstance(error, PeerFailure) and error.ranks == (1,)
    assert "bucket 2" in str(error) and "rank 1 is no more" in str(error)
    assert time.monotonic() - begun < 1.5


def test_a_store_that_fails_by_the_end_of_a_rank_says_so(alarm: Alarm) -> None:
    broken: Any = SimpleNamespace(check=_fail)
    timer = alarm.after(0.05)
    with pytest.raises(PeerFailure, match="no more") as caught:
        InterruptibleStore(broken, alarm).check(["key"])
    timer.join()
    assert "connection reset" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="connection reset"):
        InterruptibleStore(broken, Alarm()).check(["key"])


def _fail(keys: list[str]) -> bool:
    raise RuntimeError("connection reset")


# -- a store whose writers may die at any moment -------------------------------------------------


def _open(path: Path, alarm: Alarm) -> LogStore:
    path.touch()
    return LogStore(str(path), alarm)


def test_a_writer_that_dies_at_any_write_leaves_a_store_that_works(
    tmp_path: Path, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    path, real = tmp_path / "store", os.pwrite
    other = _open(path, alarm)
    other.set("before", "1")
    for reach in range(0, 40, 3):  # so many bytes of a record arrive

        def dies(file: int, data: Any, at: int, reach: int = reach) -> int:
            real(file, data[:reach], at)
            raise Killed

        victim = _open(path, alarm)
        with monkeypatch.context() as patch:
            patch.setattr("phalanx.comm.failure.log_store.os.pwrite", dies)
            with pytest.raises(Killed):
                victim.set("torn", "x" * 20)
        del victim  # the kernel gives up the lock of the dead
        assert not other.check(["torn"]) and other.get("before") == b"1"
        other.set(f"after {reach}", "y" * reach)
        assert _open(path, alarm).get(f"after {reach}") == b"y" * reach


def test_a_lock_whose_holder_has_stopped_is_waited_for_until_the_interruption(tmp_path: Path, alarm: Alarm) -> None:
    store, holder = _open(tmp_path / "store", alarm), os.open(tmp_path / "store", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        assert not store.check(["key"]), "who reads needs no lock"
        _ends(alarm, lambda: store.set("key", "value"))
    finally:
        os.close(holder)


def test_what_several_count_and_compare_is_exact(tmp_path: Path, alarm: Alarm) -> None:
    stores = [_open(tmp_path / "store", alarm) for _ in range(3)]
    won = []

    def count(store: LogStore, mine: str) -> None:
        for _ in range(50):
            store.add("count", 1)
        won.append(store.compare_set("first", "", mine))

    threads = [threading.Thread(target=count, args=(store, str(number))) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].get("count") == b"150"
    assert len(set(won)) == 1 and stores[1].get("first") == won[0]
    assert stores[2].delete_key("first") and not stores[2].delete_key("first") and stores[0].num_keys() == 1


_INTERRUPTED = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from phalanx.comm.failure.arrivals import Arrivals
from phalanx.comm.failure.interruption import interruptible

class Lasting:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

sys.lasting = Lasting()  # until the thread below has come back
store, limit = dist.HashStore(), timedelta(seconds=1.0)
store.set_timeout(limit)
arrivals = Arrivals(store, (0, [0, 1]), 30.0)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
interruptible(lambda: dist.ProcessGroupGloo(store, 0, 2, timeout=limit), arrivals)
"""


def test_ctrl_c_while_a_group_is_made_ends_the_process_as_an_interrupt() -> None:
    ended = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=50)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stderr.endswith("KeyboardInterrupt\n"), ended.stderr
