"""What a worker tells of an elastic run: to the launcher, to whoever looks at its pulse, and to the script's callback.

Every rank that goes on makes the same events, in the same order: of what the launcher told when it formed the generation,
and of what the ranks told each other. The callback is called between steps, when all of them can go on, never in the midst
of a change.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..comm.failure.folding import users_stacklevel
from ..errors import CollectiveTimeout, PeerFailure
from ..launch.elastic.member import Formed, Member
from ..launch.elastic.story import Event, Story
from ..observe.live.pulse import pulse

OnEvent = Callable[[Event], None]


def warn_of_other_launcher(rank: int, world: int) -> None:
    """Say that nothing is elastic here. One process alone has nobody to lose, and is how a script is tried out."""
    if world > 1 and rank == 0:
        warnings.warn(
            "rank 0: phalanx.elastic.run has no effect, since this script was not started by phalanx run --elastic: when a "
            "rank is lost all end, and --max-restarts (also torchrun's) starts all again. Start it so, or keep a "
            "phalanx.Checkpointer to go on from.",
            stacklevel=users_stacklevel(),
        )


class Telling:
    """Of one worker."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._untold: list[Event] = []
        self._failed: Exception | None = None
        self._is_between = False  # the ranks part at the end of a step: nothing is under way
        self.was_in_step = False
        """Whether this worker was in the midst of a step when its generation broke."""
        self._there: list[tuple[int, bool]] = []
        self._has_warned = False

    # -- what the training notes ---------------------------------------------------------------

    def pauses(self) -> None:
        """The generation ends here, between two steps."""
        self._is_between = True

    def breaks(self) -> None:
        """The generation was broken."""
        self.was_in_step = self.was_in_step or not self._is_between

    def heard(self, versions: Sequence[int | None], were_in_step: Sequence[bool]) -> None:
        """Where each rank of the new generation stood; None for one who has just come."""
        pairs = zip(versions, were_in_step, strict=True)
        self._there = [(version, was_in_step) for version, was_in_step in pairs if version is not None]

    def stepped(self, member: Member, step: int) -> None:
        """A step was committed."""
        pulse.committed = step
        for record in member.take_notes():
            if self._on_event is not None:
                self._untold += [replace(event, step=step) for event in Story().add(record)]

    def goes_on(self, member: Member, formed: Formed, step: int, **facts: Any) -> None:
        """All ranks can go on from `step`. `paused_s` among the facts: how long this one stood still."""
        facts |= {
            "at_ns": time.time_ns(),  # not when the launcher comes to hear of it
            "generation": formed.generation,
            "step": step,
            "world": formed.world,
            # Who was in the midst of a step that is done now has not lost it.
            "abandoned": any(was_in_step and version == step for version, was_in_step in self._there),
            "rolled": any(version < step for version, _ in self._there),
        }
        self.was_in_step = self._is_between = False
        pulse.goes_on_from(step)
        if formed.rank == 0:
            member.tell("formed", **facts)
        if self._on_event is not None:
            story = Story()
            for record in formed.since:
                story.add(record)
            story.add({"event": "formed", **facts})
            self._untold += story.events

    # -- the script ----------------------------------------------------------------------------

    def warn_of_no_step(self, epoch: int) -> None:
        """Say, once, that an epoch has come to nothing that could be gone on from."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"no optimizer that elastic.run() was given has stepped in epoch {epoch}, so that nothing of it is "
                "committed: after a loss it is done again, and nobody joins. Give it the optimizer whose step() is called, "
                "not one around it or one that was made later.",
                stacklevel=users_stacklevel(),
            )

    def tell(self) -> None:
        """Call the script's callback with what it does not know yet."""
        while self._on_event is not None and self._untold:
            try:
                self._on_event(self._untold.pop(0))
            except (PeerFailure, CollectiveTimeout):
                raise  # it used the group, and another rank was lost meanwhile
            except Exception as error:
                self._failed = error
                raise

    def is_of_callback(self, error: Exception) -> bool:
        """Whether the callback raised it: then it is the script's own. A connection that it lost is not a rank that was."""
        return error is self._failed
