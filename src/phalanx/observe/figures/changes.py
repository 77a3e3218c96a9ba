"""What became of the ranks of an elastic run, for the report: a table of changes, and who was which rank when. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from phalanx.launch.elastic.story import Event, Generation, Story, What
from phalanx.observe.run import Run

MOST_WORKERS = 60
"""Rows of the picture; of more workers the last ones."""

_ENDS = {What.LOST: "lost", What.FENCED: "fenced", What.LEFT: "left", What.FAILED_TO_JOIN: "lost"}


@dataclass(frozen=True)
class Change:
    """From one generation to the next, or what happened without one."""

    at_s: float
    """Since the run was started."""
    words: list[str]
    step: int | None
    world: int | None
    going_on_s: float | None
    """From the loss, or from the pause, until all ranks could go on."""
    next_step_s: float | None
    """From there until a step was committed that nobody had committed before."""


def changes(run: Run) -> list[Change]:
    """In the order of time; empty for a run that is not elastic."""
    story, found, together = run.story, [], []
    if story is None:
        return []
    for event in story.events:
        together.append(event)
        if event.what is What.FORMED:
            found.append(_change(run, story, together))
            together = []
    # What happened since the last change, or a change that never came about.
    return found + ([_change(run, story, together)] if together else [])


def _change(run: Run, story: Story, events: list[Event]) -> Change:
    first, last = events[0], events[-1]
    formed = last if last.what is What.FORMED else None
    words = [str(event) for event in events if event.what is not What.FORMED]
    if formed is None:
        return Change(_seconds(run, first.at_ns), words, first.step, None, None, None)
    generation = story.generation(formed.generation)
    paused_ns = formed.at_ns - int(1e9 * (formed.seconds or 0.0))
    got_on_ns = generation.got_on_ns if generation is not None else None
    until_step = None if got_on_ns is None else (got_on_ns - paused_ns) / 1e9
    return Change(_seconds(run, paused_ns), words, formed.step, formed.world, formed.seconds, until_step)


def recoveries(run: Run) -> list[float]:
    """Seconds from each loss to the next committed step, in order."""
    story, by_change = run.story, changes(run)
    if story is None:
        return []
    formed = [event for event in story.events if event.what is What.FORMED]
    pairs = zip(formed, by_change, strict=False)
    return [one.next_step_s for event, one in pairs if event.why and one.next_step_s is not None]


def in_words(run: Run) -> str:
    """One sentence about all of it; "" where nothing happened."""
    story = run.story
    if story is None or not story.events:
        return ""
    lost = story.count(What.LOST) + story.count(What.FENCED)
    counts = {"lost": lost, "left": story.count(What.LEFT), "joined": story.count(What.JOINED)}
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none lost"
    spent = recoveries(run)
    if not spent:
        return f"Ranks came and went: {said}."
    median, longest = statistics.median(spent), max(spent)
    took = f"{median:.2f} s in the median, {longest:.2f} s at most" if len(spent) > 1 else f"{longest:.2f} s"
    return f"Ranks came and went: {said}. From a loss to the next committed step it took {took}."


def marks(run: Run) -> list[list[Any]]:
    """[seconds on the clock of the traces, words] of every change."""
    if run.story is None or run.began_wall_ns is None:
        return []
    formed = [event for event in run.story.events if event.what is What.FORMED]
    return [[round((event.at_ns - run.began_wall_ns) / 1e9, 3), str(event)] for event in formed]


def workers_over_time(run: Run) -> dict[str, Any] | None:
    """A JSON value: per worker when it was started and which rank it was from when to when, in seconds of the run."""
    story = run.story
    if story is None:
        return None
    known = sorted({*story.started_ns, *(worker for one in story.generations for worker in one.members)})
    shown = known[-MOST_WORKERS:]
    end = _end(run, story)
    return {
        "until": round(end, 3),
        "left_out": len(known) - len(shown),
        "workers": [_worker(run, story, worker, end) for worker in shown],
        "changes": [round(_seconds(run, one.from_ns), 3) for one in story.generations[1:]],
    }


def _worker(run: Run, story: Story, worker: int, end: float) -> dict[str, Any]:
    gone = next((event for event in story.events if event.worker == worker and event.what in _ENDS), None)
    gone_ns = gone.at_ns if gone is not None else story.ended_ns.get(worker)
    last = end if gone_ns is None else _seconds(run, gone_ns)
    followed = zip(story.generations, [*story.generations[1:], None], strict=True)
    times = [(one, end if later is None else _seconds(run, later.from_ns)) for one, later in followed]
    bars = [_bar(run, one, worker, min(until, last)) for one, until in times if worker in one.members]
    started_ns = story.started_ns.get(worker)
    begun = bars[0]["from"] if bars else round(last, 3)
    return {
        "worker": worker,
        "bars": bars,
        "starting": None if started_ns is None else [round(_seconds(run, started_ns), 3), begun],
        "end": None if gone is None else {"at": round(last, 3), "kind": _ENDS[gone.what], "words": str(gone)},
    }


def _bar(run: Run, generation: Generation, worker: int, until: float) -> dict[str, Any]:
    begun = _seconds(run, generation.from_ns)
    return {
        "generation": generation.number,
        "rank": generation.members.index(worker),
        "from": round(begun, 3),
        "until": round(max(begun, until), 3),
        "step": generation.step,
    }


def _began_ns(run: Run) -> int:
    began = run.facts.get("started_ns")
    if isinstance(began, int) and not isinstance(began, bool):
        return began
    story = run.story
    known = [] if story is None else [*story.started_ns.values(), *(event.at_ns for event in story.events)]
    return min(known, default=0)


def _seconds(run: Run, at_ns: int) -> float:
    return (at_ns - _began_ns(run)) / 1e9


def _end(run: Run, story: Story) -> float:
    seconds = run.facts.get("seconds")
    known = [*story.ended_ns.values(), *(event.at_ns for event in story.events), *(one.from_ns for one in story.generations)]
    last = max((_seconds(run, at_ns) for at_ns in known), default=0.0)
    return max(last, float(seconds)) if isinstance(seconds, int | float) else last
