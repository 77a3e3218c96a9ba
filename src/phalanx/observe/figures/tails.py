"""The last lines that each rank wrote, for a report that has nothing else to show. Follows no links."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
            text = _tail(path.relative_to(run.path), run.path)
            if text:
                number = folder.name[5:]
                found.append((f"{run.who} {int(number)}, {stream}" if number.isdecimal() else stream, text))
    return found


def _tail(path: Path, root: Path) -> str:
    try:
        with open(_open_below(root, path.parts), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _BYTES))
            text = file.read(_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-_LINES:])


def _open_below(root: Path, names: Sequence[str]) -> int:
    """A run folder from elsewhere may hold links, at any of these names, to any file or folder of ours."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            below = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at
