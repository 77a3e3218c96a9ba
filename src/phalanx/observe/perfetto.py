"""A run as a Chrome trace file, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a rank; threads as they were, except that collectives under way at the same time get rows of their
own, since the format cannot draw spans that cross on one row.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from phalanx.observe import trace
from phalanx.observe.intervals import rows
from phalanx.observe.made import write_made
from phalanx.observe.run import RankTrace, Run, Span
from phalanx.observe.stats import COMMUNICATION

_FIRST_COMMUNICATION_ROW = 1000


def export(run: Run, path: str | Path) -> Path:
    """Write the run to `path` and return it."""
    value = {"traceEvents": events(run), "displayTimeUnit": "ms"}
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        # Perfetto and Chrome refuse a whole file for one number that is none: it becomes a word.
        text = json.dumps(json.loads(json.dumps(value), parse_constant=str))
    return write_made(text, path, run.path)


def events(run: Run) -> list[dict[str, Any]]:
    """The trace events, times in microseconds."""
    return [event for rank in run.ranks for event in _rank_events(rank, run.who)] + _changes(run)


def _changes(run: Run) -> list[dict[str, Any]]:
    """What became of the ranks of an elastic run, as marks across all of them."""
    if run.story is None or run.began_wall_ns is None:
        return []
    began = run.began_wall_ns
    return [
        {"ph": "i", "s": "g", "name": str(event), "pid": 0, "tid": 0, "ts": (event.at_ns - began) / 1000}
        for event in run.story.events
    ]


def _rank_events(rank: RankTrace, who: str) -> list[dict[str, Any]]:
    threads = _thread_numbers(rank)
    found: list[dict[str, Any]] = [
        _named("process_name", rank.rank, 0, f"{who} {rank.rank} on {rank.header.get('host', '?')}"),
    ]
    found += [
        _named("thread_name", rank.rank, number, "training" if number == 0 else f"thread {number}")
        for number in sorted(threads.values())
    ]
    communication = rank.named(*COMMUNICATION)
    drawn = rows([(span.start, span.end) for span in communication])
    found += [
        _named("thread_name", rank.rank, _FIRST_COMMUNICATION_ROW + row, "communication") for row in sorted(set(drawn))
    ]
    for span, row in zip(communication, drawn, strict=True):
        found.append(_complete(rank.rank, _FIRST_COMMUNICATION_ROW + row, span))
    for span in rank.spans:
        if span.name not in COMMUNICATION:
            found.append(_complete(rank.rank, threads[span.thread], span))
    for instant in rank.instants:
        found.append(
            {
                "ph": "i",
                "s": "p" if instant.name in (trace.WARNING, trace.FAILURE) else "t",
                "name": instant.name,
                "pid": rank.rank,
                "tid": threads[instant.thread],
                "ts": instant.at / 1000,
                "args": instant.attrs,
            }
        )
    for scalar in rank.scalars:
        if not math.isfinite(scalar.value):
            continue  # a gap in the curve
        found.append(
            {
                "ph": "C",
                "name": scalar.name,
                "pid": rank.rank,
                "ts": scalar.at / 1000,
                "args": {"value": scalar.value},
            }
        )
    return found


def _thread_numbers(rank: RankTrace) -> dict[int, int]:
    seen = [span.thread for span in rank.spans] + [instant.thread for instant in rank.instants]
    main = rank.header.get("main_thread")
    ordered = dict.fromkeys([main] if isinstance(main, int) else [])
    ordered.update(dict.fromkeys(seen))
    return {thread: number for number, thread in enumerate(ordered)}


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _complete(rank: int, thread: int, span: Span) -> dict[str, Any]:
    shown = span.name if span.bucket is None else f"{span.name} {span.bucket}"
    return {
        "ph": "X",
        "name": shown,
        "cat": span.name,
        "pid": rank,
        "tid": thread,
        "ts": span.start / 1000,
        "dur": (span.end - span.start) / 1000,
        "args": span.attrs,
    }
