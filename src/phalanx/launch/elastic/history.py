"""The record of an elastic run: written by its launcher, one JSON object per line, and read by whoever looks at the run.

What a record means is `story`'s business.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, BinaryIO, TextIO

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import StateError
from phalanx.launch.elastic.story import Story
from phalanx.launch.rundir import LONGEST, RunDirectory, open_plain, open_private

EVENTS_FILE = "elastic.jsonl"
_MOST_BYTES = 1 << 26  # of one look; a run of weeks has that many events, each of them short


class History:
    """Writes it down and says it. A disk that is full does not end a run that survives the loss of its ranks."""

    def __init__(self, directory: RunDirectory, notice: Notice) -> None:
        self._notice = notice
        self._story = Story()
        try:
            self._file: TextIO | None = open(open_private(directory.root / EVENTS_FILE), "w", buffering=1)
        except OSError:
            self._file = None  # the record of the run could not be written either, and the launcher has said so

    def note(self, record: dict[str, Any]) -> None:
        """Something has happened."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")
        for event in self._story.add(record):
            self._notice(str(event))

    def close(self) -> None:
        """The run is over."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None


class Watching:
    """The story of a run as far as it is written; every look reads what was added. For one thread."""

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.root / EVENTS_FILE
        self._file: BinaryIO | None = None
        self._rest = b""
        self._story = Story()

    def look(self) -> Story | None:
        """None for a run that is not elastic."""
        if self._file is None:
            with contextlib.suppress(StateError, OSError):
                self._file = open_plain(self._path)
        if self._file is None:
            return None
        *lines, self._rest = (self._rest + self._file.read(_MOST_BYTES)).split(b"\n")
        for line in lines:
            if len(line) > LONGEST:
                continue
            # A folder from elsewhere may hold anything: what is no record is left out.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
                self._story.add(json.loads(line))
        return self._story

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def tell(directory: RunDirectory) -> Story | None:
    """The whole story of a run; None for one that was not elastic."""
    watching = Watching(directory)
    try:
        return watching.look()
    finally:
        watching.close()
