"""What the coordinator is to do, as `Membership` decides it. In this order, one after the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Start so many workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker for good: whatever it does from now on must reach nobody."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Let a worker go on that somebody has stopped."""

    worker: int


@dataclass(frozen=True, slots=True)
class Break:
    """The generation under way is over, by one of its members: whoever waits for others in it must not go on waiting."""

    generation: int
    members: tuple[int, ...]
    by: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Let the members come to the meeting when they have ended the step they are in."""


@dataclass(frozen=True, slots=True)
class Form:
    """These workers, in the order of their ranks, are the next generation."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A worker at the meeting is not needed any more; it ends well."""

    worker: int


@dataclass(frozen=True, slots=True)
class Preserve:
    """A worker at the meeting is the last of its generation, and waits for others: what it holds should outlive it."""

    worker: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on."""

    why: str


Action = Start | Kill | Wake | Break | Pause | Form | Dismiss | Preserve | GiveUp
