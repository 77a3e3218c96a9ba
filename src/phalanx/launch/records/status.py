"""The state of a run's ranks now, read from the files in which each writes its pulse. Reads only.

Owns who is the slowest and who waits for whom, in one place for the status line of `phalanx run` and for `phalanx top`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from phalanx.errors import StateError
from phalanx.launch.elastic.story import Story, What
from phalanx.launch.rundir import RunDirectory, read_record

# Below this difference between ranks, in shares of their time, nobody is the slowest.
_NOTEWORTHY_WAITING = 0.05
# A rank that has waited so long is not in an ordinary step any more.
_LONG_WAIT_S = 2.0
_STALE_S = 5.0
_NO_NUMBERS = ("state", "loss", "apart", "joined", "worker")


@dataclass(frozen=True)
class RankStatus:
    """One rank's pulse. `waiting` is the share of the last seconds in which it stood still for communication."""

    rank: int
    state: str
    for_s: float
    step: int
    steps_per_s: float
    waiting: float
    samples_per_s: float
    loss: float | None
    resident: int
    wall_s: float
    apart: bool = False
    """Whether it trains by itself though it has joined the others."""
    joined: bool = False
    """Whether it was seen to be in a process group, or in RPC."""
    worker: int | None = None
    """In an elastic run: its number among all workers that the run ever had; `rank` is what it is now."""

    @property
    def silent_s(self) -> float:
        """How long ago it wrote, beyond what is usual; 0 while it does."""
        age = time.time() - self.wall_s
        return age if age > _STALE_S else 0.0


def read(directory: RunDirectory, story: Story | None = None) -> list[RankStatus]:
    """The ranks of the latest start that have written anything yet, by number; of an elastic run those that train now."""
    attempt = directory.last_attempt()
    files = sorted(attempt.glob("rank-*/status.json")) if attempt is not None else []
    found = [one for one in map(_read_one, files) if one is not None]
    if story is not None:
        # A worker's files are named by its number, and stay when it is gone.
        ranks = story.ranks
        found = [replace(one, rank=ranks[one.rank], worker=one.rank) for one in found if one.rank in ranks]
    return sorted(found, key=lambda one: one.rank)


def _read_one(path: Path) -> RankStatus | None:
    try:
        value = read_record(path)
        numbers = {each.name: value[each.name] for each in fields(RankStatus) if each.name not in _NO_NUMBERS}
        # A folder from elsewhere may hold anything: what is no number here is no status.
        if not all(isinstance(number, int | float) for number in numbers.values()):
            return None
        loss = value["loss"] if isinstance(value["loss"], int | float) else None
        apart, joined = value.get("apart") is True, value.get("joined") is True
        return RankStatus(**numbers, state=str(value["state"]), loss=loss, apart=apart, joined=joined)
    except (OSError, StateError, ValueError, KeyError, TypeError):
        return None  # not written yet, or being made


def slowest(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """The rank that the others wait for most of the time; None where all wait about equally."""
    working = [one for one in ranks if one.step and one.state != "ended"]
    if len(working) < 2:
        return None
    least = min(working, key=lambda one: one.waiting)
    most = max(one.waiting for one in working)
    return least if most - least.waiting > _NOTEWORTHY_WAITING else None


def waited_for(ranks: Sequence[RankStatus]) -> list[int]:
    """Ranks that compute while others have been waiting for long: who holds the run up at this moment."""
    waiting = [one for one in ranks if one.state == "waiting" and one.for_s > _LONG_WAIT_S]
    return [one.rank for one in ranks if one.state != "waiting"] if waiting else []


def line(ranks: Sequence[RankStatus], world: int, story: Story | None = None) -> str:
    """All of it in one line."""
    if not ranks:
        return "starting"
    pieces = [f"step {min(one.step for one in ranks)}"] if any(one.step for one in ranks) else ["no step yet"]
    rate = min(one.steps_per_s for one in ranks)
    if rate:
        pieces.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s a step")
    samples = sum(one.samples_per_s for one in ranks)
    if samples:
        pieces.append(f"{samples:,.0f} samples/s")
    losses = [one.loss for one in ranks if one.loss is not None]
    if losses:
        pieces.append(f"loss {sum(losses) / len(losses):.4g}")
    pieces += _people(ranks, world if story is None else len(ranks))
    if story is not None:
        pieces.append(_changes(story))
    pieces.append(f"{max(one.resident for one in ranks) / 1e6:,.0f} MB at most")
    return " · ".join(pieces)


def _changes(story: Story) -> str:
    """Who trains, and who does not any more or yet, in an elastic run."""
    lost, coming = story.count(What.LOST) + story.count(What.FENCED), len(story.coming)
    besides = [f"{lost} lost"] * bool(lost) + [f"{coming} coming"] * bool(coming)
    ranks = f"{len(story.ranks)} rank{'s' * (len(story.ranks) != 1)}"
    return f"{ranks} ({', '.join(besides)})" if besides else ranks


def _people(ranks: Sequence[RankStatus], world: int) -> list[str]:
    held_up = waited_for(ranks)
    if held_up:
        longest = max(one.for_s for one in ranks if one.state == "waiting")
        return [f"waiting for rank {', '.join(map(str, held_up))} since {longest:.0f} s"]
    late = slowest(ranks)
    if late is not None:
        return [f"slowest: rank {late.rank}"]
    return [f"{len(ranks)} of {world} ranks up"] if len(ranks) < world else []
