"""How what was learnt survives a rank, and from where a worker goes on: the words that `training` speaks in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..checkpoint.source import Source
from .transaction import Passing


class Keeping(enum.Enum):
    """How what was learnt survives a rank.

    WRITTEN   every rank writes its share to memory that outlives it, at each commit: the state is divided, or it is not
              known yet that a step is one step of one optimizer, so that nobody may hold it whole in the midst of
              one, or there is one rank only
    HELD      every rank holds all of it: nothing is written, and who has lost the thread takes it from another
    IN_PLACE  every rank's share is in such memory itself, and stepped there: nothing is copied, and a step that was cut
              short is finished by who is left (`place`)
    """

    WRITTEN = enum.auto()
    HELD = enum.auto()
    IN_PLACE = enum.auto()


@dataclass(frozen=True, slots=True)
class Taken:
    """From where this worker goes on: what was learnt is in `source`, or here already if that is None."""

    version: int
    keeping: Keeping
    source: Source | None
    passing: Passing
    own: Passing | None
    """What this worker itself kept of what passes; None for one who has just come."""
