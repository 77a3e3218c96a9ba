"""A page of memory that a worker and its launcher share: what each must see of the other without asking.

    the launcher writes   over     the newest generation of this worker that is over
                          by       the rank by whose loss or leaving it is
    the worker writes     pid      its process
                          beats    a count that grows while its threads run
                          waits    whether its training thread waits for other ranks

A page is a file in memory, without a name in any folder, which the worker opens through the launcher's entry in /proc; only
their own user may follow that. Each number is aligned and written whole. Must not know what follows from any of them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

from phalanx.errors import CommunicationError, PeerFailure

_OVER, _BY, _PID, _BEATS, _WAITS = range(5)
_BEAT_S = 0.1


class Page:
    """One worker's page, as either side sees it. Closed by whoever made it."""

    least_s = 0.0  # a process of this host can be ended for certain at any moment

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over."""
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """Where the worker finds it, of a page that the launcher has made."""
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        # Native words: each is stored by one instruction, so that the other side never sees half of one.
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def make(cls, name: str) -> Page:
        """A new one, for the launcher."""
        descriptor = os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor)

    @classmethod
    def open(cls, path: str) -> Page:
        """The one at `path`, for the worker."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Let go of it; neither side's words can be read or written any more. Not while a heart beats on it."""
        self._words.release()
        self._memory.close()
        os.close(self._descriptor)

    # -- the launcher's words --------------------------------------------------------------------

    @property
    def over(self) -> int:
        """The newest generation that is over."""
        return self._words[_OVER]

    @property
    def by(self) -> int:
        """By which rank of it."""
        return self._words[_BY]

    def end_generation(self, generation: int, by: int) -> None:
        """This generation is over, because of that rank of it."""
        # In this order: whoever sees the first finds the second.
        self._words[_BY] = by
        self._words[_OVER] = generation

    # -- the worker's words ----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The worker's process; 0 until it has come so far."""
        return self._words[_PID]

    @property
    def beats(self) -> int:
        """Another number than a moment ago if the process runs; 0 until it has begun to."""
        return self._words[_BEATS]

    @property
    def ticks(self) -> int:
        """How much of the processor the worker has used."""
        return processor_ticks(self.pid)

    @property
    def waits(self) -> bool:
        """Whether its training thread waits for others."""
        return bool(self._words[_WAITS])

    def enter(self) -> None:
        """This process is the worker."""
        self._words[_PID] = os.getpid()

    def beat(self, waits: bool) -> None:
        """A sign of life."""
        self._words[_WAITS] = waits
        self._words[_BEATS] += 1


def processor_ticks(pid: int) -> int:
    """How much of the processor a process has used; 0 if nobody can tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # After the name, which may hold blanks: the state is the first, user and system time are the 12th and 13th.
            words = file.read().rpartition(")")[2].split()
        return int(words[11]) + int(words[12])
    except (OSError, IndexError, ValueError):
        return 0


class Heart:
    """A thread that gives signs of life, as long as this process lets its threads run."""

    def __init__(self, page: Page, waits: Callable[[], bool]) -> None:
        self._page, self._waits = page, waits
        page.enter()
        # A daemon, never joined: it holds nothing, and ends with the process. A forked child has no such thread.
        threading.Thread(target=self._run, name="phalanx-heart", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._page.beat(self._waits())
            pause.wait(_BEAT_S)


class GenerationOver:
    """Whether a generation is over, for those of its ranks that wait: an `Interruption` (comm.failure)."""

    def __init__(self, page: Page, generation: int, rank: int) -> None:
        self._page, self._generation, self._rank = page, generation, rank

    def error(self) -> CommunicationError | None:
        if self._page.over < self._generation:
            return None
        by = self._page.by
        return PeerFailure(
            f"rank {self._rank}: the launcher ended generation {self._generation}: rank {by} was lost, or has left it.", [by]
        )
