"""One worker process as the pytest process sees it: start, talk, look into, kill."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.cluster.call import STACKS_SIGNAL
from tests.cluster.leaks import RUN_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
# What a process needs in PYTHONPATH to import the package and the tests of this tree, installed or not.
SEARCH_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
# One compute thread a worker, said before torch is imported, since the fork server must have no
# threads of its own; no pool of compile processes, which would outlive the call that made it; and what a
# rank prints is written at once, so that pytest shows it even when the rank is killed.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": SEARCH_PATH,
}


class RankProcess:
    """A worker process, forked from a server that has torch and phalanx imported.

    Whoever makes one must `kill` it, however things go.
    """

    def __init__(self) -> None:
        context = _fork_server()
        self.connection, theirs = context.Pipe(duplex=True)
        descriptor, self._stacks_path = tempfile.mkstemp(dir=_stacks_directory())
        os.close(descriptor)
        self._process = context.Process(target=_serve, args=(theirs, self._stacks_path))
        with _environment({**SERVER_ENVIRONMENT, RUN_VARIABLE: str(os.getpid())}):
            self._process.start()
        theirs.close()
        assert self._process.pid is not None, "a started process has a pid"
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """Readable once the process has ended."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it: negative for a signal, None while alive."""
        return self._process.exitcode

    def send(self, message: Any) -> None:
        """Hand a message over; a process that has ended is noticed by its sentinel, not here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The message that has arrived, or None when the process ended without one."""
        try:
            return pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def stacks(self, wait_s: float = 1.0) -> str:
        """The Python stacks of all its threads, now, even while it hangs in native code."""
        if self.exitcode is not None:
            return f"(no stacks: the process ended with exit code {self.exitcode})"
        os.kill(self.pid, STACKS_SIGNAL)
        deadline, text = time.monotonic() + wait_s, ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, text = text, Path(self._stacks_path).read_text(errors="replace")
            if text and text == previous:
                return text
        return text or "(no stacks: the process does not answer signals)"

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code once it ends, None if it does not within `timeout_s`."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """End it and whatever it started; afterwards only `exitcode` may be asked."""
        # The server has reaped it by the time it is known to have ended, and its number may be a stranger's since: then
        # there is a process of that number. While the group has members the kernel gives the number to nobody.
        if self.exitcode is None or not Path(f"/proc/{self.pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        # Not redundant: it may not have got as far as making its own process group.
        self._process.kill()
        self._process.join()
        self.connection.close()
        Path(self._stacks_path).unlink(missing_ok=True)


def _serve(connection: Connection, stacks_path: str) -> None:
    # Imported in the worker only: the pytest process may be running without torch.
    from tests.cluster.worker import serve

    serve(connection, stacks_path)


@cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cluster.preload"])
    return context


@cache
def _stacks_directory() -> str:
    directory = tempfile.mkdtemp(prefix="phalanx-cluster-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
