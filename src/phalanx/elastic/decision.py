"""From where a new generation goes on, when every rank holds all that was learnt: decided from what its members say. Pure.

A member has committed some version, and may have begun, or ended, the optimizer's step to the next one. Its parameters are
whole unless a step has begun and not ended. No member can be two versions ahead of another.

    somebody is at the newest version, and has begun no step        all go on from there; who is elsewhere takes its state
    everybody there has ended the optimizer's step to the next one  the step is done on all that are left: it is completed
    somebody there has begun it and not ended it                    that one takes the state of one who has ended
    nobody is whole                                                 the state is lost

The first line is also how a step is undone: where nobody has stepped, nothing has to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import StateError

LOST = "every rank that held the state is lost. Start again from the newest checkpoint (Checkpointer.restore)."


@dataclass(frozen=True, slots=True)
class Report:
    """Where one member stands. `version` is None for one who has just come."""

    version: int | None
    begun: bool = False
    ended: bool = False
    has_scheduled: bool = False
    """Whether the scheduler was stepped since the optimizer's step ended."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Go on from `version`, which rank `source` has; `takers` take its state. `completes`: nobody has committed it yet."""

    version: int
    source: int
    takers: tuple[int, ...]
    completes: bool = False


def decide(reports: Sequence[Report]) -> Decision | None:
    """By rank of the new generation. None if the state is lost."""
    known = [report.version for report in reports if report.version is not None]
    if not known:
        return None
    newest = max(known)
    clean = [rank for rank, report in enumerate(reports) if report.version == newest and not report.begun]
    if clean:
        return Decision(newest, clean[0], tuple(rank for rank in range(len(reports)) if rank not in clean))
    # All who are at the newest version have gone beyond it, so that all had reduced the step: nobody can be behind.
    whole = [rank for rank, report in enumerate(reports) if report.version == newest and report.ended]
    if not whole:
        return None
    return Decision(newest + 1, whole[0], tuple(rank for rank in range(len(reports)) if rank not in whole), True)


def holder(said: Sequence[bool | None]) -> int | None:
    """Who has all of a divided state from before the first commit. `said` by rank: whether it does, None if it has nothing.

    None if nobody has anything. Raises StateError if all have shares only: that of who was lost is nowhere.
    """
    if all(one is None for one in said):
        return None
    if True not in said:
        raise StateError(
            "a rank was lost before anything was committed, and with it its share of the optimizer's state that was loaded "
            "before the training function. Start again, and load it again."
        )
    return said.index(True)
