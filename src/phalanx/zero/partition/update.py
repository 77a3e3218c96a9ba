"""One update of the parameters: from the first bucket that is stepped until all of them are back on all ranks.

    state        parameters                                    next
    WHOLE        of one step, on all ranks                     begin -> UPDATING; made_in_backward -> UNCONFIRMED
    UPDATING     stepped in part, here or on another rank      end -> WHOLE; raised -> TORN
    UNCONFIRMED  of one step, made by a backward that no call  begin -> UPDATING; confirm -> WHOLE
                 of `step()` has followed
    TORN         between two steps, for good                   none: whoever uses them is told

Each rank steps its own part, so that ranks have stepped different ones when an update raises: where one rank steps another
optimizer, or calls something else, the others are left in the midst of theirs. Pure: no process group.
"""

from __future__ import annotations

import enum


class UpdateState(enum.Enum):
    """What has become of the latest update: see the table above."""

    WHOLE = enum.auto()
    UPDATING = enum.auto()
    UNCONFIRMED = enum.auto()
    TORN = enum.auto()


WHOLE, UPDATING, UNCONFIRMED, TORN = UpdateState


class Update:
    """The latest update of one optimizer. It outlives partitions, and is made anew with the optimizer's group."""

    def __init__(self) -> None:
        self.state = WHOLE

    @property
    def is_under_way(self) -> bool:
        """Whether parameters have been stepped in part."""
        return self.state is UPDATING

    def begin(self) -> None:
        """The first bucket is about to be stepped, here or on another rank."""
        assert self.state in (WHOLE, UNCONFIRMED), f"an update begins while {self.state.name}"
        self.state = UPDATING

    def end(self) -> None:
        """Every parameter is back on all ranks."""
        assert self.state is UPDATING, f"an update ends while {self.state.name}"
        self.state = WHOLE

    def made_in_backward(self) -> None:
        """After `end`: a call of `step()` may follow, which is to do nothing more."""
        assert self.state is WHOLE, f"an update was made while {self.state.name}"
        self.state = UNCONFIRMED

    def confirm(self) -> bool:
        """The user has called `step()`; whether an update waited for it."""
        waited = self.state is UNCONFIRMED
        if waited:
            self.state = WHOLE
        return waited

    def raised(self) -> None:
        """What was going on raised. If that was an update, it can neither be finished nor undone."""
        if self.state is UPDATING:
            self.state = TORN
