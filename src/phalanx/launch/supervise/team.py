"""The worker processes of one host: started together or one alone, seen to end, told to end, killed.

Owns every process it started until it is reaped. Decides nothing: `policy` does.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping

from phalanx.launch.start.child import Child, wait_for_any, wait_for_end
from phalanx.launch.start.order import HANDLED_NAMES, Order
from phalanx.launch.start.starter import signals_blocked

HANDLED = tuple(getattr(signal, name) for name in HANDLED_NAMES)
"""Signals that end a launcher, and its workers with it."""

Start = Callable[[Order], Child]


class Interrupted(BaseException):
    """A signal asks this launcher to end. Not an Exception: nothing on the way may take it for a failure of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class Team:
    """The workers by their local rank. `end` or `kill` before it is dropped, however things go."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._children: dict[int, Child] = {}
        self._heard: set[int] = set()
        self.terminated: set[int] = set()
        """Local ranks that SIGTERM ended while nobody here had sent it."""
        self._killed: set[int] = set()

    def start(self, orders: Mapping[int, Order]) -> None:
        """Start these workers; who of them ran before must have ended. Raises OSError, with nothing left half started."""
        # All or none: an exception of a signal in the middle would leave some that nobody knows of.
        with signals_blocked():
            for local_rank, order in orders.items():
                self._children[local_rank] = self._start(order)
                for ranks in (self._heard, self.terminated, self._killed):
                    ranks.discard(local_rank)

    def pid(self, local_rank: int) -> int:
        """Of a worker that was started."""
        return self._children[local_rank].pid

    def wait(self, timeout_s: float) -> None:
        """Return when a worker ends, or after `timeout_s`."""
        wait_for_any(self._children.values(), timeout_s)

    def newly_ended(self) -> dict[int, int]:
        """Exit codes, by local rank, of workers that ended by themselves since this was asked last."""
        found = {}
        for local_rank, child in self._children.items():
            exitcode = child.poll()
            if exitcode is not None and local_rank not in self._heard:
                self._heard.add(local_rank)
                found[local_rank] = exitcode
                child.kill_what_it_left()
                if exitcode == -signal.SIGTERM:
                    self.terminated.add(local_rank)
        return found

    def sentinels(self) -> list[int]:
        """Descriptors that are readable once a worker has ended, of those that run."""
        return [child.sentinel for child in self._children.values() if child.exitcode is None and child.sentinel >= 0]

    def kill_one(self, local_rank: int, why: str) -> None:
        """End one worker now, with what it started; how it ended is told by `newly_ended`."""
        child = self._children.get(local_rank)
        if child is not None and child.poll() is None:
            self._killed.add(local_rank)
            child.tell(signal.SIGKILL)

    def wake_one(self, local_rank: int) -> None:
        """Let one worker go on that somebody has stopped, with what it started."""
        if local_rank in self._children:
            self._children[local_rank].tell(signal.SIGCONT)

    def exitcodes(self) -> dict[int, int | None]:
        """How every worker ended. One that we had to kill counts as told to end, which it had been before."""
        codes = {local_rank: child.poll() for local_rank, child in self._children.items()}
        return {rank: -signal.SIGTERM if rank in self._killed else code for rank, code in codes.items()}

    def end(self, number: int, grace_s: float) -> None:
        """Tell all that still run to end, and kill who has not after `grace_s`. A second signal interrupts the grace."""
        self.newly_ended()  # whoever ended before was not told by us
        for child in self._children.values():
            child.tell(number)
        wait_for_end(self._children.values(), grace_s)
        self.kill()

    @contextlib.contextmanager
    def ended_with(self, grace_s: float) -> Iterator[None]:
        """However the block ends, no worker is alive afterwards: they are told to end as we are, given time, then killed."""
        told = signal.SIGTERM
        try:
            yield
        except Interrupted as interrupted:
            # They get the signal that we got: an interrupt may mean something else to a script than SIGTERM.
            told = interrupted.signal
            raise
        finally:
            try:
                self.end(told, grace_s)
            finally:
                self.kill()

    def kill(self) -> None:
        """End whatever is left, with what it started. Signals are ignored meanwhile: the second must not save a worker."""
        with deaf():
            for local_rank, child in self._children.items():
                if child.poll() is None:
                    self._killed.add(local_rank)
                    child.kill()
                child.kill_what_it_left()


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Within the block signals that would end the launcher are ignored: nothing is left that they could end."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
