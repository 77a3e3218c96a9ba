"""The traces of a run while it is written: the last seconds of every rank, for displays that want the report's own numbers.

Reads what was added since the last look and forgets what is old, so that a look costs as much at the end of a long run as at
its beginning.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.launch.rundir import open_plain
from phalanx.observe.run import RankTrace, is_event, place_events
from phalanx.observe.stats import hidden_share_of


class _Followed:
    """One rank's file, and its recent events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self.header: dict[str, Any] = {}
        self.events: list[list[Any]] = []

    def read(self, window_ns: int) -> None:
        if self._file is None:
            self._file = open_plain(self._path)
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            # A folder from elsewhere may hold anything: what is no event is left out.
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict) and isinstance(value.get("rank"), int):
                    self.header = value
                elif is_event(value):
                    self.events.append(value)
        newest = max((event[3] for event in self.events if event[0] == "span"), default=0)
        self.events = [event for event in self.events if event[0] == "span" and event[3] > newest - window_ns]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RecentTraces:
    """The last `window_s` seconds of every rank that traces into `folder`. Used as a context manager."""

    def __init__(self, folder: Path, window_s: float = 10.0) -> None:
        self._folder, self._window_ns = folder, int(window_s * 1e9)
        self._files: dict[Path, _Followed] = {}

    def look(self) -> list[RankTrace]:
        """Every rank's recent spans."""
        for path in self._folder.glob("trace-rank*.jsonl"):
            self._files.setdefault(path, _Followed(path)).read(self._window_ns)
        known = [one for one in self._files.values() if one.header]
        return [place_events(one.header, one.events) for one in known]

    def hidden(self) -> dict[int, float | None]:
        """The share of each rank's communication that was hidden, as the report defines it, over the last seconds."""
        return {rank.rank: hidden_share_of([rank]) for rank in self.look()}

    def __enter__(self) -> RecentTraces:
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self._files.values():
            one.close()
