"""The last lines that each rank wrote, for a report that has nothing else to show. Follows no links."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.launch.rundir import RankFiles, RunDirectory
from phalanx.observe.run import Run

_BYTES, _LINES = 6000, 15
_MOST_RANKS = 8


def tails(run: Run) -> list[tuple[str, str]]:
    """(name, text) of each stream of the first ranks of the last start that wrote anything."""
    attempt = RunDirectory(run.path).last_attempt()
    if attempt is None:
        return []
    found = []
    for folder in sorted(attempt.glob("rank-*"))[:_MOST_RANKS]:
        files = RankFiles(folder)
        for stream, path in (("stdout", files.stdout), ("stderr", files.stderr)):
            text = _tail(path)
            if text:
                number = folder.name[5:]
                found.append((f"{run.who} {int(number)}, {stream}" if number.isdecimal() else stream, text))
    return found


def _tail(path: Path) -> str:
    try:
        # A run folder from elsewhere may hold a link of this name to any file of ours.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        file.seek(max(0, size - _BYTES))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(text.rstrip().splitlines()[-_LINES:])
