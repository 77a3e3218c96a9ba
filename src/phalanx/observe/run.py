"""A run read back from its directory: every rank's trace on one clock, and what `run.json` says.

Owns the meaning of the trace files that `trace.Recorder` writes. A file cut off in the middle of a line, as a
killed rank leaves it, is read up to there.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.errors import StateError
from phalanx.launch.elastic.history import tell
from phalanx.launch.elastic.story import Story
from phalanx.launch.rundir import LONGEST, RunDirectory, open_plain
from phalanx.observe import trace


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time; times in nanoseconds since the run's first event."""

    name: str
    start: int
    end: int
    thread: int
    attrs: dict[str, Any]

    @property
    def bucket(self) -> int | None:
        """The bucket it belongs to, when it belongs to one."""
        bucket = self.attrs.get("bucket")
        return bucket if isinstance(bucket, int) else None


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened."""

    name: str
    at: int
    thread: int
    attrs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of a curve."""

    name: str
    at: int
    step: int | None
    value: float


@dataclass
class RankTrace:
    """One rank's events, each kind in order of time."""

    rank: int
    header: dict[str, Any]
    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def named(self, *names: str) -> list[Span]:
        """The spans of these names."""
        return [span for span in self.spans if span.name in names]

    def curve(self, name: str) -> list[Scalar]:
        """The points of one curve."""
        return self._curves.get(name, [])

    @cached_property
    def _curves(self) -> dict[str, list[Scalar]]:
        found: dict[str, list[Scalar]] = {}
        for scalar in self.scalars:
            found.setdefault(scalar.name, []).append(scalar)
        return found


@dataclass
class Run:
    """All that a run left: `facts` is its `run.json` (maybe empty), `ranks` the traces found (maybe none)."""

    path: Path
    facts: dict[str, Any]
    ranks: list[RankTrace]
    began_wall_ns: int | None = None
    """The wall clock at the run's first event."""
    story: Story | None = None
    """What became of the ranks of an elastic run. Its traces are by worker: a rank may be another one later."""

    @property
    def who(self) -> str:
        """What a trace is of: a rank, or a worker of an elastic run."""
        return "rank" if self.story is None else "worker"

    @property
    def duration_ns(self) -> int:
        """From the first event to the last."""
        ends = [span.end for rank in self.ranks for span in rank.spans]
        ends += [scalar.at for rank in self.ranks for scalar in rank.scalars]
        return max(ends, default=0)


def load(path: str | Path) -> Run:
    """Read a run directory, or a folder that holds nothing but traces. Raises StateError on anything else."""
    root = Path(path)
    if not root.exists():
        raise StateError(f"there is no run directory {root}. `phalanx run --trace` names the one it writes.")
    if not root.is_dir():
        raise StateError(f"{root} is a file. Name the directory that `phalanx run --trace` wrote.")
    directory = RunDirectory(root)
    facts = directory.facts()
    where = directory.last_attempt() or root
    files = sorted(where.glob("trace-rank*.jsonl"))
    if not files and not facts:
        raise StateError(
            f"{root} holds no run: neither run.json nor trace files. Name a directory that `phalanx run --trace` wrote."
        )
    raw = [one for one in map(_read, files) if one is not None]
    for one in raw:
        _check(one)
    try:
        zeros = _zeros(raw)
        wall = [one.header["wall_ns"] - one.header["perf_ns"] + zero for one, zero in zip(raw, zeros, strict=True)]
        ranks = [_place(events, zero) for events, zero in zip(raw, zeros, strict=True)]
    except (TypeError, OverflowError) as error:
        raise StateError(f"{root} is malformed: an event holds a moment or a value that is none ({error}).") from error
    return Run(root, facts, ranks, min(wall, default=None), tell(directory))


@dataclass
class _RawTrace:
    path: Path
    header: dict[str, Any]
    events: list[list[Any]]


def _read(path: Path) -> _RawTrace | None:
    """A rank's trace; None if it was cut off, by a full disk or a kill, before its first line was whole."""
    with io.TextIOWrapper(open_plain(path), encoding="utf-8", errors="replace") as file:
        # In bounded pieces: a file of holes has one line without an end. What is cut here is no JSON, and the last.
        lines = iter(lambda: file.readline(LONGEST), "")
        first = next(lines, "")
        if not first:
            return None
        try:
            header = json.loads(first)
            version = header["phalanx_trace"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StateError(f"{path} is not a phalanx trace: its first line is no header") from None
        if version != trace.FORMAT_VERSION:
            raise StateError(
                f"{path} is a trace of version {version}, this phalanx reads version "
                f"{trace.FORMAT_VERSION}. Read it with the phalanx that wrote it."
            )
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except RecursionError:
                raise StateError(f"{path} is malformed: line {len(events) + 2} is nested too deeply.") from None
            except ValueError:
                # Only a write that was cut off leaves this, and nothing follows it.
                break
    return _RawTrace(path, header, events)


# What each kind of event holds after its kind; `observe.trace` writes them.
_SHAPES: dict[str, tuple[Any, ...]] = {
    "span": (str, int, int, object, dict),
    "instant": (str, int, object, dict),
    "scalar": (str, int, (int, type(None)), (int, float)),
    "fact": (str, int, object),
}
_HEADER = {"rank": int, "boot": object, "wall_ns": int, "perf_ns": int}


def is_event(value: Any) -> bool:
    """Whether a line of a trace holds an event of a known kind and form."""
    kind = value[0] if isinstance(value, list) and value else None
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    return shape is not None and len(value) == len(shape) + 1 and all(map(isinstance, value[1:], shape))


def _check(raw: _RawTrace) -> None:
    """Refuse a trace that was edited, cut or made up, in words, before anything is made of it."""
    for name, wanted in _HEADER.items():
        if name not in raw.header or not isinstance(raw.header[name], wanted):
            raise StateError(f"{raw.path} is malformed: its header has no {name!r}. Trace the run again.")
    for number, event in enumerate(raw.events, start=2):
        if not is_event(event):
            kind = event[0] if isinstance(event, list) and event else None
            shape = _SHAPES.get(kind) if isinstance(kind, str) else None
            what = f"an event of unknown kind {kind!r}" if isinstance(kind, str) and shape is None else "no event"
            raise StateError(f"{raw.path} is malformed: line {number} holds {what} ({json.dumps(event)[:60]}).")


def _zeros(raw: list[_RawTrace]) -> list[int]:
    """For each trace, the reading of its own clock at the run's first event.

    Ranks of one boot share a clock, so they share one anchor and are aligned exactly; between hosts the
    wall clock is all there is.
    """
    anchors: dict[str, int] = {}
    for one in raw:
        anchors.setdefault(str(one.header["boot"]), one.header["wall_ns"] - one.header["perf_ns"])
    offsets = [anchors[str(one.header["boot"])] for one in raw]
    firsts = [
        offset + event[2] for one, offset in zip(raw, offsets, strict=True) for event in one.events if len(event) > 2
    ]
    first = min(firsts, default=0)
    return [first - offset for offset in offsets]


def place_events(header: dict[str, Any], events: list[list[Any]]) -> RankTrace:
    """Events of one rank as they are read from its file, times as they are there."""
    return _place(_RawTrace(Path(), header, events), 0)


def _place(raw: _RawTrace, zero: int) -> RankTrace:
    rank = RankTrace(int(raw.header["rank"]), raw.header)
    for event in raw.events:
        kind, name = event[0], event[1]
        if kind == "span":
            attrs = event[5]
            if "ready_ns" in attrs:
                attrs["ready_ns"] -= zero
            rank.spans.append(Span(name, event[2] - zero, event[3] - zero, event[4], attrs))
        elif kind == "instant":
            rank.instants.append(Instant(name, event[2] - zero, event[3], event[4]))
        elif kind == "scalar":
            rank.scalars.append(Scalar(name, event[2] - zero, event[3], float(event[4])))
        elif kind == "fact":
            rank.facts[name] = event[3]
        else:
            raise AssertionError(f"{kind!r} has been refused by _check")
    raw.events = []  # of a long run both forms together would not fit
    rank.spans.sort(key=lambda span: (span.start, -span.end))
    rank.instants.sort(key=lambda instant: instant.at)
    rank.scalars.sort(key=lambda scalar: scalar.at)
    return rank
