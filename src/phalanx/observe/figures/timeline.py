"""The part of a run that the report draws as bars: a few telling passes, every rank, on one clock. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from phalanx.observe import trace
from phalanx.observe.generations import Part, parts
from phalanx.observe.intervals import clip, difference, rows
from phalanx.observe.run import RankTrace, Run, Span
from phalanx.observe.stats import COMMUNICATION, COMPUTE, pass_lengths, passes, working

MOST_PASSES = 24
MOST_RANKS = 16
MOST_PIECES = 20_000
"""Bars of a rank's communication in a pass. No run has as many; in a made-up trace each span may be cut by each other."""
MOST_LENGTHS = 600
"""Lengths of passes that are drawn; of a longer run every n-th, the longest of its neighbourhood."""


def timeline(run: Run) -> dict[str, Any]:
    """A JSON value: which passes and ranks are drawn, and their bars in ms from the pass's start."""
    together = [_Together(part) for part in parts(run)]
    # Passes of all generations in a row, each with who made it and its place among theirs.
    whole = [(one, index) for one in together for index in range(len(one.lengths))]
    lengths = [one.lengths[index] for one, index in whole]
    begins = [at for at, (_, index) in enumerate(whole) if index == 0]
    names = {at: f"generation {whole[at][0].part.number}" for at in begins[1:]}
    chosen = _telling_passes(lengths, begins)
    return {
        "left_out_ranks": max((one.num_left_out for one in together), default=0),
        "num_passes": len(whole),
        "lengths": _lengths(lengths),
        "changes": begins[1:],
        "passes": [_pass_value(*whole[at], at, label or names.get(at, "")) for at, label in chosen],
    }


class _Together:
    """Ranks that trained together: passes are matched among them by their order."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.drawn = [_Drawn(rank) for rank in _drawn_ranks(part.ranks)]
        self.num_left_out = len(part.ranks) - len(self.drawn)
        # Of all ranks, drawn or not: the figures at the top of the page are made of the same.
        self.lengths = pass_lengths([passes(rank) for rank in part.ranks])


class _Drawn:
    """One rank, prepared so that cutting a pass out of a long run is quick."""

    def __init__(self, rank: RankTrace) -> None:
        self.trace = rank
        self.rank = rank.rank
        self.passes = passes(rank)
        self.busy = working(rank)
        self.filled = _filled(rank)
        self._spans = [span for span in rank.spans if span.name in (*COMPUTE, *COMMUNICATION, trace.WAITING)]
        self._starts = [span.start for span in self._spans]
        self._longest = max((span.end - span.start for span in self._spans), default=0)

    def inside(self, start: int, end: int) -> list[Span]:
        """The spans under way at any moment between two."""
        first = bisect_left(self._starts, start - self._longest)
        last = bisect_left(self._starts, end)
        return [span for span in self._spans[first:last] if span.end > start]


def _filled(rank: RankTrace) -> list[tuple[int, int | None]]:
    """When buckets filled: said by an instant of its own, or by the reduction that followed."""
    instants = [
        (instant.at, instant.attrs.get("bucket")) for instant in rank.instants if instant.name == trace.BUCKET_FILLED
    ]
    said = [(span.attrs["ready_ns"], span.bucket) for span in rank.spans if "ready_ns" in span.attrs]
    return instants + said


def _drawn_ranks(ranks: list[RankTrace]) -> list[RankTrace]:
    if len(ranks) <= MOST_RANKS:
        return ranks
    return [ranks[index * (len(ranks) - 1) // (MOST_RANKS - 1)] for index in range(MOST_RANKS)]


def _telling_passes(lengths: list[int], begins: list[int]) -> list[tuple[int, str]]:
    count = len(lengths)
    if count == 0:
        return []
    # The first of ranks that are together anew makes what all others use.
    steady = sorted({*range(count)} - {*begins}) or list(range(count))
    usual = sorted(steady, key=lambda k: lengths[k])[len(steady) // 2]
    slowest = max(steady, key=lambda k: lengths[k])
    labels = {0: "first", count - 1: "last", slowest: "slowest", usual: "typical"}
    labels |= {at: labels.get(at, "") for at in begins[:MOST_PASSES]}
    spread = {index * (count - 1) // max(1, MOST_PASSES - 5) for index in range(MOST_PASSES - 4)}
    return [(k, labels.get(k, "")) for k in sorted(spread | set(labels))]


def _lengths(whole: list[int]) -> list[list[float]]:
    """(index, ms of the slowest rank) of passes: all, or in a long run the longest of each stretch."""
    count = len(whole)
    stretch = max(1, -(-count // MOST_LENGTHS))
    chosen = [max(range(at, min(at + stretch, count)), key=whole.__getitem__) for at in range(0, count, stretch)]
    return [[k, round(whole[k] / 1e6, 4)] for k in chosen]


def _pass_value(together: _Together, index: int, at: int, label: str) -> dict[str, Any]:
    drawn = together.drawn
    start = min(one.passes[index].start for one in drawn)
    end = max(one.passes[index].end for one in drawn)
    return {
        "index": at,
        "label": label,
        "ms": round((end - start) / 1e6, 4),  # of the picture, from the first rank's start to the last one's end
        "length": round(together.lengths[index] / 1e6, 4),
        "ranks": [{"name": together.part.name(one.trace), **_rank_value(one, start, end)} for one in drawn],
    }


def _rank_value(drawn: _Drawn, start: int, end: int) -> dict[str, Any]:
    def ms(at: int) -> float:
        return round((at - start) / 1e6, 4)

    inside = drawn.inside(start, end)
    compute = [
        [span.name, ms(max(span.start, start)), ms(min(span.end, end)), span.bucket]
        for span in inside
        if span.name in (*COMPUTE, trace.WAITING)
    ]
    moving = [span for span in inside if span.name in COMMUNICATION]
    placed = rows([(span.start, span.end) for span in moving])
    busy = clip(drawn.busy, start, end)
    pieces: list[list[Any]] = []
    for span, row in zip(moving, placed, strict=True):
        if len(pieces) > MOST_PIECES:
            break
        for a, b, hidden in _pieces(span, busy, start, end):
            pieces.append([span.name, span.bucket, row, ms(a), ms(b), hidden, span.attrs.get("bytes", 0), _span_ms(span)])
    filled = [[ms(at), bucket] for at, bucket in drawn.filled if start <= at < end]
    return {"rank": drawn.rank, "compute": compute, "communication": pieces, "filled": filled}


def _span_ms(span: Span) -> float:
    return round((span.end - span.start) / 1e6, 4)


def _pieces(span: Span, busy: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int, bool]]:
    """The span cut where the rank began or stopped computing, each piece hidden or not."""
    whole = clip([(span.start, span.end)], start, end)
    if not whole:
        return []
    hidden = clip(busy, *whole[0])
    return sorted([(a, b, True) for a, b in hidden] + [(a, b, False) for a, b in difference(whole, hidden)])
