"""What happened to an elastic run: one line each in the run's folder, and in words for who looks on.

    {"at_ns", "event": "started" | "ended" | "lost" | "fenced" | "formed" | "gets on" | "straggler" | "woken" |
     "scale", "worker", "rank", …}
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, TextIO

from phalanx.comm.failure.waiting import Notice
from phalanx.launch.rundir import RunDirectory, open_private

EVENTS_FILE = "elastic.jsonl"


class History:
    """Writes it down. A disk that is full does not end a run that survives the loss of its ranks."""

    def __init__(self, directory: RunDirectory, notice: Notice) -> None:
        self._notice = notice
        self._lost_ns = 0
        try:
            self._file: TextIO | None = open(open_private(directory.root / EVENTS_FILE), "w", buffering=1)
        except OSError:
            self._file = None  # the record of the run could not be written either, and the launcher has said so

    def note(self, event: dict[str, Any]) -> None:
        """Something has happened."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.write(json.dumps(event) + "\n")
        words = self._words(event)
        if words:
            self._notice(words)

    def _words(self, event: dict[str, Any]) -> str:
        kind, rank = event["event"], event.get("rank")
        if kind in ("lost", "fenced"):
            self._lost_ns = self._lost_ns or event["at_ns"]
        if kind == "ended" and event["code"] != 0 and rank is not None:
            return f"rank {rank} (worker {event['worker']}) was lost: {_how(event['code'])}"
        if kind == "fenced" and rank is not None:
            return f"rank {rank} (worker {event['worker']}) was ended: {event['why']}"
        if kind == "formed":
            since = f", {(event['at_ns'] - self._lost_ns) / 1e9:.2f} s after the loss" if self._lost_ns else ""
            self._lost_ns = 0
            undone = f"; {event['undone']} undone" if event.get("undone") else ""
            return f"goes on with {event['world']} ranks from step {event['step']}{since}{undone}"
        if kind == "straggler":
            since = f"{event['seconds']:.0f} s"
            return f"rank {rank} (worker {event['worker']}) has kept all others waiting for {since}; it is alive"
        if kind == "woken":
            return f"rank {rank} (worker {event['worker']}) had stopped, as all have, and was told to go on"
        if kind == "scale":
            return f"asked to go on with {event['wanted']} ranks"
        return ""


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def read(directory: RunDirectory) -> list[dict[str, Any]]:
    """What was written down; empty for a run that was not elastic."""
    try:
        lines = (directory.root / EVENTS_FILE).read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]

