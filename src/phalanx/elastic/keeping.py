"""How what was learnt survives a rank, and from where a worker goes on: the words that `training` speaks in."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..checkpoint.source import Source
from ..optim.in_backward import InBackward
from .decision import Report
from .transaction import AfterStep, Passing


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


def looks_closely_at(version: int) -> bool:
    """Whether it is looked at, until the next commit, if a script changes trained parameters through `.data`: at the first
    steps, in which those show who do so at every step, and then now and then, since it costs a reading of all of them."""
    return version < 8 or version % 32 == 0


@dataclass(frozen=True, slots=True)
class Taken:
    """From where this worker goes on: what was learnt is in `source`, or here already if that is None."""

    version: int
    keeping: Keeping
    source: Source | None
    passing: Passing
    own: Passing | None
    """What this worker itself kept of what passes; None for one who has just come."""


class Steps:
    """The optimizers' steps since the last commit: how many have begun, and how many have ended."""

    def __init__(self, optimizers: Iterable[Any], after_step: AfterStep) -> None:
        self.begun = self.ended = 0
        self.has_closure = False
        """Whether any step, ever, was given a closure: backward, and so a loss, comes inside of such a step."""
        self._after_step = after_step
        for one in optimizers:
            if not isinstance(one, InBackward):
                one.register_step_pre_hook(self._begins)
                one.register_step_post_hook(self._ends)

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.begun += 1
        self.has_closure = self.has_closure or callable(args[1] if len(args) > 1 else kwargs.get("closure"))
        self._after_step.check()

    def _ends(self, *_: Any) -> None:
        self.ended += 1
        self._after_step.begin()

    def report(self, version: int | None) -> Report:
        """Where this rank stands, which has committed `version`."""
        return Report(version, self.begun > 0, self.ended == self.begun, self._after_step.has_moved)

    def forget(self) -> None:
        """They are committed, or never were."""
        self.begun = self.ended = 0
        self._after_step.forget()
