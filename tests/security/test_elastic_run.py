"""An elastic run with its starter, coordinator, sockets and files in memory: another user gets at none of them.

The intruder is at work for the whole life of the run, while workers meet, one is lost, and another comes in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.elastic.test_launcher import ELASTIC, SETTING
from tests.security.intruder import NOBODY, Running, attempt, needs_namespaces, needs_root, network

pytestmark = pytest.mark.timeout(120)

_PIDFD_GETFD = 438  # of every architecture; Python has no function for it
_MOST_DESCRIPTORS = 64


class Intruder:
    """A process of another user, forked from this one, that tries what it can on a launcher and all below it."""

    def __init__(self, launcher: int, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._result, theirs = os.pipe()
        stopped, self._stop = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                os.close(self._stop)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                os.write(theirs, json.dumps(self._work(stopped)).encode())
            os._exit(0)
        os.close(theirs)
        os.close(stopped)

    def end(self) -> dict[str, list[str]]:
        """What it tried, and what it got."""
        os.close(self._stop)
        with open(self._result) as result:
            text = result.read()
        os.waitpid(self._pid, 0)
        found: dict[str, list[str]] = json.loads(text)
        return found

    def _work(self, stopped: int) -> dict[str, list[str]]:
        tried: set[str] = set()
        got: set[str] = set()
        while not select.select([stopped], [], [], 0.01)[0]:
            for name in _abstract_names():
                tried.add("socket")
                got |= _knock(name)
            for pid in _family(self._launcher):
                tried |= {"process"}
                got |= _look_into(pid)
            got |= _look_at_files(self._folder)
        return {"tried": sorted(tried), "got": sorted(got)}


def _family(launcher: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [launcher, *(child.pid for child in psutil.Process(launcher).children(recursive=True))]
    return []


def _abstract_names() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return [line.split()[-1][1:] for line in lines if "@phalanx-" in line]


def _knock(name: str) -> set[str]:
    """Connect to an abstract address and say something: nothing may come back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect("\0" + name)
            connection.send(b'[0, ""]')
            data, descriptors, _, _ = socket.recv_fds(connection, 4096, 8)
        except OSError:
            return set()
    return {f"{name} answered {data!r} with {len(descriptors)} descriptors"} if data or descriptors else set()


def _look_into(pid: int) -> set[str]:
    got = set()
    for file in ("environ", "maps", "mem", "fd", "cwd"):
        with contextlib.suppress(OSError):
            path = f"/proc/{pid}/{file}"
            # Some kernels let everybody open a file in there and give nothing to read.
            if os.listdir(path) if file in ("fd", "cwd") else Path(path).read_bytes():
                got.add(path)
    for number in range(_MOST_DESCRIPTORS):
        for mode in (os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/{pid}/fd/{number}", mode))
                got.add(f"/proc/{pid}/fd/{number}")
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        for number in range(_MOST_DESCRIPTORS):
            if ctypes.CDLL(None).syscall(_PIDFD_GETFD, handle, number, 0) >= 0:
                got.add(f"descriptor {number} of {pid}")
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            got.add(f"signal to {pid}")
        os.close(handle)
    return got


def _look_at_files(folder: Path) -> set[str]:
    got = set()
    for path in (folder / "runs", *folder.glob("runs/*"), *folder.glob("runs/*/*")):
        with contextlib.suppress(OSError):
            os.listdir(path) if path.is_dir() else path.read_bytes()
            if path.name != "runs":  # which runs there are may be seen
                got.add(str(path))
        with contextlib.suppress(OSError):
            (path / "scale").write_text("1")
            got.add(f"scale in {path}")
    return got


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into, so that what is kept from them is kept by the run itself."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@needs_root
@pytest.mark.thorough  # what it tries of any run is in test_one_host.py
def test_another_user_gets_at_nothing_of_an_elastic_run(open_folder: Path) -> None:
    options = ("--elastic", "--nproc", "3", "--min", "2")
    with Running(open_folder, SETTING + ELASTIC, *options) as run:
        intruder = Intruder(run.process.pid, open_folder)
        seen: set[tuple[str, str]] = set()
        while run.process.poll() is None:
            seen |= _named_sockets(run.process.pid)
            time.sleep(0.05)
        found = intruder.end()
        assert run.end() == 0, run.said()
    assert "goes on with 3 ranks" in run.said(), "a worker was lost and replaced meanwhile"
    assert found["got"] == [] and "process" in found["tried"], found
    assert seen <= {("tcp", "127.0.0.1")}, "nothing listens but on loopback"


def _named_sockets(launcher: int) -> set[tuple[str, str]]:
    """Where the launcher and those below it listen on TCP; on a unix socket only workers do, while they meet."""
    found = set()
    for pid in _family(launcher):
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(("tcp", one.laddr.ip))
                    assert pid != launcher, "the launcher listens nowhere"
    return found


SWEEP = """
import socket, sys
for port in sys.argv[2:]:
    print(socket.socket().connect_ex((sys.argv[1], int(port))))
for name in open("/proc/net/unix").read().split():
    if name.startswith("@phalanx-"):
        print("sees", name)
"""


@needs_namespaces
def test_another_host_reaches_nothing_of_an_elastic_run(tmp_path: Path) -> None:
    slow = ELASTIC.replace("seen.append", "time.sleep(0.05)\n            seen.append")
    slow = slow.replace("os.kill(os.getpid(), signal.SIGKILL)", 'print("trains", flush=True)')
    with network(2) as net, Running(tmp_path, SETTING + slow, "--elastic", "--nproc", "2", prefix=net.on(0)) as run:
        run.wait_for("trains")
        ports = [str(port) for _, port in net.listening(0)]
        _, said = attempt(net.on(1, sys.executable, "-c", SWEEP, net.addresses[0], *(ports or ["29500"])))
        assert set(said.split()) == {"111"}, said  # refused, and no address of a worker to be seen
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.said()
