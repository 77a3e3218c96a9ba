"""Waiting is not silent: after ten seconds one line says who waits for whom, where and since when; then rarely."""

from __future__ import annotations

import time
from collections.abc import Callable

Notice = Callable[[str], None]
"""Called with one line for the user."""

FIRST_S = 10.0
_THEN_S = (60.0, 300.0)
_AFTERWARDS_EVERY_S = 600.0


class Waiting:
    """One wait. Whoever waits calls `look` now and then; most calls say nothing."""

    def __init__(self, notice: Notice, started: float | None = None) -> None:
        """`started`: when the wait began, by the monotonic clock; now, if it begins now."""
        self._notice = notice
        self._started = time.monotonic() if started is None else started
        self._next_s = FIRST_S
        self._later = list(_THEN_S)

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    def look(self, words: Callable[[], str]) -> None:
        """Say `words()` if it is time for it."""
        seconds = self.seconds
        if seconds < self._next_s:
            return
        self._next_s = self._later.pop(0) if self._later else seconds + _AFTERWARDS_EVERY_S
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        self._notice(f"waiting since {since} ({seconds:.0f} s): {words()}")
