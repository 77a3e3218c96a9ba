"""Who gives no sign of life, and who keeps the others waiting: told from what workers write to their pages.

A worker is silent if neither its heart has beaten nor its process has used the processor for the whole time limit: it is
stopped, frozen or stuck in the kernel. One whose threads cannot run, because some library holds Python's lock for minutes,
uses the processor. Must not know what is done about it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

# A launcher that was stopped itself (Ctrl-Z, a suspended job, a debugger) must not take that time for its workers' silence.
LONGEST_LOOK_S = 1.0
_SHORTEST_LIMIT_S = 1.0  # several beats, on a busy machine


class Signs(Protocol):
    """What is seen of a worker: its page, here or on another host."""

    @property
    def beats(self) -> int: ...

    @property
    def waits(self) -> bool: ...

    @property
    def ticks(self) -> int: ...

    @property
    def least_s(self) -> float:
        """It is not taken for silent before so long, whatever the time limit."""
        ...


@dataclass
class _Sign:
    """The last sign of one worker, and when it was seen first, in time that counts."""

    beats: int
    at: float
    ticks: int | None = None  # read only once the heart stands still


@dataclass
class Silence:
    """Keeps count. Asked several times a second."""

    limit_s: float
    _clock: float = 0.0
    _looked_at: float | None = None
    _signs: dict[int, _Sign] = field(default_factory=dict)
    _kept_waiting: dict[int, float] = field(default_factory=dict)

    def lower_limit(self, limit_s: float) -> None:
        """A worker's own time limit is this."""
        self.limit_s = min(self.limit_s, max(limit_s, _SHORTEST_LIMIT_S))

    def look(self, pages: Mapping[int, Signs], now: float) -> list[int]:
        """The workers that have been silent for the limit; each is said again after another limit."""
        self._clock += 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        self._signs = {worker: sign for worker, sign in self._signs.items() if worker in pages}
        silent = []
        for worker, page in pages.items():
            if not page.beats:
                continue  # it has not come to phalanx.init() yet; starting has a time limit of its own
            sign = self._signs.get(worker)
            if sign is None or sign.beats != page.beats:
                self._signs[worker] = _Sign(page.beats, self._clock)
                continue
            ticks = page.ticks
            if sign.ticks is None:
                sign.ticks = ticks
            elif sign.ticks != ticks:
                sign.ticks, sign.at = ticks, self._clock
            elif self._clock - sign.at >= max(self.limit_s, page.least_s):
                silent.append(worker)
                sign.at = self._clock
        return silent

    def straggler(self, pages: Mapping[int, Signs], members: Collection[int], after_s: float) -> tuple[int, float] | None:
        """The one member that all others have waited for, for so long; said once per wait."""
        waiting = {worker for worker in members if worker in pages and pages[worker].waits}
        late = [worker for worker in members if worker not in waiting]
        if len(late) != 1 or not waiting:
            self._kept_waiting.clear()
            return None
        (worker,) = late
        if worker not in self._kept_waiting:
            self._kept_waiting = {worker: self._clock}
        seconds = self._clock - self._kept_waiting[worker]
        if seconds < after_s:
            return None
        self._kept_waiting[worker] = float("inf")  # said
        return worker, seconds

