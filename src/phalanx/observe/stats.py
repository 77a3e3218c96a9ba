"""What a run's traces say in numbers: where time went, what communication was hidden, who was late.

Pure: a `Run` in, numbers out. A *pass* is one backward with the communication it caused; passes are matched
between ranks by their order.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx.observe import trace
from phalanx.observe.generations import parts
from phalanx.observe.intervals import Covered, Interval, difference, intersection, length, union
from phalanx.observe.run import RankTrace, Run, Span

SMOOTHED_STEPS = 20
"""A loss is shown as the mean of so many steps."""

T = TypeVar("T")

COMPUTE = (trace.FORWARD, trace.BACKWARD, trace.OPTIMIZER)
COMMUNICATION = (trace.REDUCE, trace.GATHER)


@dataclass(frozen=True)
class RankTimes:
    """Where one rank's time went, in nanoseconds. The parts add up to `total`."""

    rank: int
    total: int
    forward: int
    backward: int
    optimizer: int
    waiting: int
    other: int
    communication: int
    """Time during which at least one collective was under way; not a part, it overlaps the others."""
    hidden: int
    """The part of `communication` during which the rank computed."""

    @property
    def hidden_share(self) -> float | None:
        """1.0 when all communication was hidden behind compute; None when there was none."""
        return self.hidden / self.communication if self.communication else None


@dataclass(frozen=True)
class Pass:
    """One rank's k-th backward: from the start of the forward before it to the start of the next."""

    index: int
    start: int
    end: int
    backward: Interval
    arrival: int
    """When the rank had nothing left to compute in backward."""


@dataclass(frozen=True)
class Lateness:
    """How late one rank was, compared with the first rank to arrive in each pass."""

    rank: int
    mean_ns: float
    share_last: float
    """The share of passes in which it arrived last."""
    caused_ns: int
    """How long the others stood still, all together, in the passes in which it arrived last: what it is to blame for."""


@dataclass(frozen=True)
class BucketTimes:
    """One bucket over the whole run, all ranks."""

    bucket: int
    bytes: int
    count: int
    """Reductions, of all ranks together."""
    mean_ns: float
    hidden_share: float


def _pairs(spans: Sequence[Span]) -> list[Interval]:
    return union((span.start, span.end) for span in spans)


def working(rank: RankTrace) -> list[Interval]:
    """When the rank computed: forward, backward and optimizer, less the time it stood waiting."""
    return difference(_pairs(rank.named(*COMPUTE)), _pairs(rank.named(trace.WAITING)))


def rank_times(rank: RankTrace) -> RankTimes:
    """Split one rank's time, from its first span to its last."""
    known = rank.named(*COMPUTE, *COMMUNICATION, trace.WAITING)
    start = min((span.start for span in known), default=0)
    end = max((span.end for span in known), default=0)
    waiting = _pairs(rank.named(trace.WAITING))
    parts = {}
    taken = waiting
    # Inner before outer: an optimizer step inside backward (ZeRO overlapped) counts as optimizer.
    for name in (trace.OPTIMIZER, trace.BACKWARD, trace.FORWARD):
        mine = difference(_pairs(rank.named(name)), taken)
        parts[name] = length(mine)
        taken = union([*taken, *mine])
    communication = _pairs(rank.named(*COMMUNICATION))
    return RankTimes(
        rank=rank.rank,
        total=end - start,
        forward=parts[trace.FORWARD],
        backward=parts[trace.BACKWARD],
        optimizer=parts[trace.OPTIMIZER],
        waiting=length(waiting),
        other=end - start - length(taken),
        communication=length(communication),
        hidden=length(intersection(communication, working(rank))),
    )


def passes(rank: RankTrace) -> list[Pass]:
    """The rank's backward passes in order."""
    backwards = rank.named(trace.BACKWARD)
    forwards = rank.named(trace.FORWARD)
    waiting = _pairs(rank.named(trace.WAITING))
    last = max((span.end for span in rank.spans), default=0)
    starts = []
    cursor = 0
    previous_end = 0
    for backward in backwards:
        start = backward.start
        while cursor < len(forwards) and forwards[cursor].start < backward.start:
            if forwards[cursor].start >= previous_end:
                start = min(start, forwards[cursor].start)
            cursor += 1
        starts.append(start)
        previous_end = backward.end
    found = []
    for index, (backward, start) in enumerate(zip(backwards, starts, strict=True)):
        end = starts[index + 1] if index + 1 < len(starts) else last
        # Looked up, and not cut out: backwards of a trace from elsewhere may all lie in each other.
        at = bisect_left(waiting, (backward.end,)) - 1
        stands = at >= 0 and waiting[at][0] > backward.start and waiting[at][1] >= backward.end
        arrival = waiting[at][0] if stands else backward.end
        found.append(Pass(index, start, max(end, backward.end), (backward.start, backward.end), arrival))
    return found


def lateness(run: Run) -> list[Lateness]:
    """Who kept the others waiting. Empty with fewer than two ranks or no complete pass."""
    found: dict[int, list[_Late]] = {}
    for part in parts(run):
        for rank, late in _lateness_of(part.ranks):
            found.setdefault(rank, []).append(late)
    totals = {rank: [sum(column) for column in zip(*each, strict=True)] for rank, each in sorted(found.items())}
    return [
        Lateness(rank, mean_ns=behind / count, share_last=num_last / count, caused_ns=int(caused))
        for rank, (count, behind, num_last, caused) in totals.items()
    ]


_Late = tuple[int, int, int, int]
"""Over some passes: how many, how far behind the first in all, how often last, how long the others waited for it."""


def _lateness_of(ranks: Sequence[RankTrace]) -> list[tuple[int, _Late]]:
    """Of ranks that trained together."""
    arrivals = [[one.arrival for one in passes(rank)] for rank in ranks]
    count = min((len(times) for times in arrivals), default=0)
    if len(arrivals) < 2 or count == 0:
        return []
    firsts = [min(times[k] for times in arrivals) for k in range(count)]
    lasts = [max(times[k] for times in arrivals) for k in range(count)]
    idle = [sum(lasts[k] - times[k] for times in arrivals) for k in range(count)]
    found = []
    for rank, times in zip(ranks, arrivals, strict=True):
        was_last = [k for k in range(count) if times[k] == lasts[k]]
        behind = sum(times[k] - firsts[k] for k in range(count))
        found.append((rank.rank, (count, behind, len(was_last), sum(idle[k] for k in was_last))))
    return found


def bucket_times(run: Run) -> list[BucketTimes]:
    """Each bucket's collectives over the run: reductions, and gathers where parameters are sharded."""
    spans: dict[int, list[tuple[Span, int]]] = {}
    for rank in run.ranks:
        busy = Covered(working(rank))
        for span in rank.named(*COMMUNICATION):
            if span.bucket is not None:
                spans.setdefault(span.bucket, []).append((span, busy.between(span.start, span.end)))
    return [_of_bucket(bucket, found) for bucket, found in sorted(spans.items())]


def _of_bucket(bucket: int, found: list[tuple[Span, int]]) -> BucketTimes:
    # By time, as for the whole run: one bucket's share is the run's where there is only one.
    whole = sum(span.end - span.start for span, _ in found)
    return BucketTimes(
        bucket=bucket,
        bytes=max(int(span.attrs.get("bytes", 0)) for span, _ in found),
        count=sum(span.name == trace.REDUCE for span, _ in found),
        mean_ns=whole / len(found),
        hidden_share=sum(hidden for _, hidden in found) / max(1, whole),
    )


def hidden_share(run: Run) -> float | None:
    """The share of all ranks' communication that was hidden behind compute; None when there was none."""
    return hidden_share_of(run.ranks)


def hidden_share_of(ranks: Sequence[RankTrace]) -> float | None:
    """The same of some ranks, or of a part of their traces."""
    times = [rank_times(rank) for rank in ranks]
    communication = sum(one.communication for one in times)
    return sum(one.hidden for one in times) / communication if communication else None


def pass_lengths(by_rank: Sequence[Sequence[Pass]]) -> list[int]:
    """How long each pass took the slowest rank, of those that every rank has."""
    count = min((len(found) for found in by_rank), default=0)
    return [max(found[k].end - found[k].start for found in by_rank) for k in range(count)]


def typical_pass(lengths: Sequence[int]) -> int | None:
    """Which pass is of the usual length (the median), the first left out because it warms up; None without passes."""
    steady = range(1, len(lengths)) if len(lengths) > 1 else range(len(lengths))
    return sorted(steady, key=lambda k: lengths[k])[len(steady) // 2] if lengths else None


def median_pass_ns(run: Run) -> int | None:
    """The length of the typical pass; of an elastic run, of those who trained together for the longest time."""
    lengths = pass_lengths([passes(rank) for rank in longest_together(run)])
    usual = typical_pass(lengths)
    return None if usual is None else lengths[usual]


@dataclass(frozen=True)
class Progress:
    """A curve's beginning and end, one number each: means over the ranks, and over a few steps where they vary."""

    first: float
    last: float


def loss_progress(run: Run) -> Progress | None:
    """The loss at the first step, and over the last `SMOOTHED_STEPS` of them: means over the ranks. None without any."""
    name = loss_name(run)
    known = [curves for curves in (_finite(part.ranks, name) for part in parts(run)) if curves]
    if not known:
        return None
    # Of an elastic run those who began, and those who are there at last.
    last = statistics.fmean(recent_mean(curve) for curve in known[-1])
    return Progress(statistics.fmean(curve[0] for curve in known[0]), last)


def _finite(ranks: Sequence[RankTrace], name: str) -> list[list[float]]:
    curves = [[point.value for point in rank.curve(name) if math.isfinite(point.value)] for rank in ranks]
    return [curve for curve in curves if curve]


def longest_together(run: Run) -> list[RankTrace]:
    """All ranks; of an elastic run those who trained together for the longest time."""
    found = [part.ranks for part in parts(run)]
    if len(found) == 1:
        return found[0]
    return max(found, key=lambda ranks: max(len(passes(rank)) for rank in ranks), default=[])


def recent_mean(values: Sequence[float]) -> float:
    """Over the last `SMOOTHED_STEPS`: single steps vary too much to be read."""
    return statistics.fmean(values[-SMOOTHED_STEPS:])


def loss_name(run: Run) -> str:
    """The curve of the loss: what the script said of it, on one rank at least, or else what was seen.

    Never one rank's the one and another's the other: what is seen may be scaled, or a part of what is said.
    """
    return trace.LOSS if any(rank.curve(trace.LOSS) for rank in run.ranks) else trace.SEEN_LOSS


def tokens_per_s(run: Run) -> float | None:
    """All ranks together, over the second half of the run, when it has settled; None where the script says nothing."""
    halves = [_second_half([point.value for point in rank.curve(trace.TOKENS_PER_S)]) for rank in longest_together(run)]
    return sum(statistics.fmean(half) for half in halves if half) if any(halves) else None


def samples_per_s(run: Run) -> float | None:
    """Samples that went through the model, all ranks together, over the second half of the passes; None if not seen."""
    total = 0.0
    for rank in longest_together(run):
        half = _second_half(passes(rank))
        seconds = (half[-1].end - half[0].start) / 1e9 if half else 0.0
        if seconds > 0:
            seen = [span for span in rank.named(trace.FORWARD) if half[0].start <= span.start < half[-1].end]
            total += sum(int(span.attrs.get("samples", 0)) for span in seen) / seconds
    return total or None


def startup_ns(run: Run) -> int | None:
    """From the launcher's start to the first forward of the slowest rank; None where either is not known."""
    began = run.facts.get("started_ns")
    first = parts(run)[:1]  # whoever came later to an elastic run was not waited for
    ranks = first[0].ranks if first else []
    firsts = [min((span.start for span in rank.named(trace.FORWARD)), default=None) for rank in ranks]
    known = [first for first in firsts if first is not None]
    if not isinstance(began, int) or not known or run.began_wall_ns is None:
        return None
    return max(0, run.began_wall_ns + max(known) - began)


def _second_half(values: Sequence[T]) -> Sequence[T]:
    return values[len(values) // 2 :]
