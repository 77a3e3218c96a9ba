"""A process that was started, as its launcher sees it: alive, ended how, told to end. It is a child of this process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

UNKNOWN = 255
"""The exit code of a process that somebody else reaped, so that nobody can tell how it ended."""


class Child:
    """One started process. Its exit code is negative for a signal, as in `subprocess`."""

    def __init__(self, pid: int, poll: Callable[[], int | None] | None = None) -> None:
        """`poll` reaps it where somebody else (a Popen) has to know of its end."""
        self.pid = pid
        self.exitcode: int | None = None
        self._reap = poll or self._wait_without_hanging
        self._pidfd = _pidfd(pid)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.exitcode is None:
            self.exitcode = self._reap()
            if self.exitcode is not None and self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return self.exitcode

    def tell(self, number: int) -> None:
        """Send a signal to it and to what it started, unless it has ended."""
        if self.poll() is not None:
            return
        # It is not reaped yet, so that its number is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                # It has not come as far as leading a group.
                os.kill(self.pid, number)

    def kill_alone(self) -> None:
        """End it now, and nothing that may still be in its group, and reap it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
            wait_for_end([self], 10.0)

    def kill(self) -> None:
        """End it and its group now, and reap it."""
        self.tell(signal.SIGKILL)
        wait_for_end([self], 10.0)

    def kill_what_it_left(self) -> None:
        """End what is in the group of a process that has failed. One that has ended well may leave something on purpose."""
        if self.exitcode in (None, 0):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                # The number is nobody else's: as long as the group has members, the system gives it to no process.
                os.killpg(self.pid, signal.SIGKILL)

    def _wait_without_hanging(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN
        return os.waitstatus_to_exitcode(status) if pid else None

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once it has ended; -1 where there is none."""
        return self._pidfd


def _pidfd(pid: int) -> int:
    """Readable when the process has ended; -1 on systems that have no such thing, where it is polled."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except OSError:
        return -1


def wait_for_any(children: Iterable[Child], timeout_s: float) -> None:
    """Return when one of them ends, or after `timeout_s`. A signal's exception passes through."""
    poller, waited = select.poll(), 0
    for child in children:
        if child.exitcode is None and child.sentinel >= 0:
            poller.register(child.sentinel, select.POLLIN)
            waited += 1
    if waited:
        poller.poll(timeout_s * 1000)
    else:
        time.sleep(timeout_s)


def wait_for_end(children: Iterable[Child], timeout_s: float) -> bool:
    """Wait until all have ended; False when `timeout_s` has passed first."""
    deadline = time.monotonic() + timeout_s
    while alive := [child for child in children if child.poll() is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait_for_any(alive, min(left, 0.05))
    return True


def child_pids() -> set[int]:
    """The children of this process, as the kernel lists them per thread."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended; another has its children now
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found
