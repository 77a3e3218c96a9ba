"""Which ranks trained together when: an elastic run cut into its generations. Pure.

Passes are matched between ranks by their order, which holds only among ranks that began together. A run that is not elastic
has one part, all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from phalanx.launch.elastic.story import Generation
from phalanx.observe.run import RankTrace, Run

_NEVER = 1 << 62


@dataclass(frozen=True)
class Part:
    """Traces of ranks that trained together, by rank; `number` is the generation's, 0 for a run that is not elastic."""

    number: int
    ranks: list[RankTrace]
    workers: tuple[int, ...] = ()

    def name(self, trace: RankTrace) -> str:
        """How a trace is called in this part."""
        if not self.number:
            return f"rank {trace.rank}"
        return f"rank {self.workers.index(trace.rank)} (worker {trace.rank})"


def parts(run: Run) -> list[Part]:
    """The run's generations that left a trace, in order."""
    if run.story is None or run.began_wall_ns is None:
        return [Part(0, run.ranks)]
    generations = run.story.generations
    ends = [later.from_ns for later in generations[1:]]
    found = []
    for generation, end_ns in zip(generations, [*ends, None], strict=True):
        ranks = _during(run, generation, end_ns)
        if ranks:
            found.append(Part(generation.number, ranks, generation.members))
    return found


def _during(run: Run, generation: Generation, end_ns: int | None) -> list[RankTrace]:
    # From when it was formed, not from when all could go on: nobody trains between, and the first may be off already.
    zero = run.began_wall_ns or 0
    start = generation.from_ns - zero
    end = _NEVER if end_ns is None else end_ns - zero
    traces = {trace.rank: trace for trace in run.ranks}
    return [_cut(traces[worker], start, end) for worker in generation.members if worker in traces]


def _cut(trace: RankTrace, start: int, end: int) -> RankTrace:
    # All three are in order of time; a run of weeks has thousands of generations.
    return RankTrace(
        trace.rank,
        trace.header,
        trace.spans[bisect_left(trace.spans, start, key=_begins) : bisect_left(trace.spans, end, key=_begins)],
        trace.instants[bisect_left(trace.instants, start, key=_at) : bisect_left(trace.instants, end, key=_at)],
        trace.scalars[bisect_left(trace.scalars, start, key=_at) : bisect_left(trace.scalars, end, key=_at)],
        trace.facts,
    )


_begins, _at = attrgetter("start"), attrgetter("at")
