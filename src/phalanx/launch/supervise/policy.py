"""What happens when a worker ends. Pure: events in, decisions out; no process, no clock.

    event \\ state        all run                       some have ended well
    Started              GO_ON                         GO_ON
    Ended, code 0        GO_ON; FINISHED by the last   the same
    Ended, other code    AGAIN while restarts are left, else FAILED
    HostsChanged         AGAIN, which does not count as a restart

This is `AllOrNone`, what torchrun does: the workers of a round live and die together. Another policy plugs in here: one
that answers `REPLACE` has the supervisor start that worker anew while the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True)
class Started:
    """A worker of this host was started, by its number on the host."""

    local_rank: int


@dataclass(frozen=True)
class Ended:
    """A worker ended by itself or by a signal of somebody else; those that the supervisor ends are not told."""

    local_rank: int
    exitcode: int


@dataclass(frozen=True)
class HostsChanged:
    """Another host came or went, and the hosts form a new round."""


Event = Started | Ended | HostsChanged


class Decision(Enum):
    """What the supervisor does next."""

    GO_ON = "go on"
    REPLACE = "start the worker that ended anew; the others go on"
    AGAIN = "end all workers and start them all anew"
    FINISHED = "the run has ended well here"
    FAILED = "end all workers; the run has failed"


class Policy(Protocol):
    """Hears of every event in order, until it answers with a decision that ends the round."""

    restarts: int
    """How often workers were started anew after a failure; they read it as TORCHELASTIC_RESTART_COUNT."""

    def hear(self, event: Event) -> Decision: ...


class AllOrNone:
    """The workers are started together, restarted together, and a failure of one ends all."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._running: set[int] = set()
        self.restarts = 0

    def hear(self, event: Event) -> Decision:
        match event:
            case Started(local_rank):
                self._running.add(local_rank)
                return Decision.GO_ON
            case Ended(local_rank, 0):
                self._running.discard(local_rank)
                return Decision.GO_ON if self._running else Decision.FINISHED
            case Ended():
                return self._again_after_failure()
            case HostsChanged():
                self._running.clear()
                return Decision.AGAIN

    def _again_after_failure(self) -> Decision:
        self._running.clear()
        if self.restarts >= self._max_restarts:
            return Decision.FAILED
        self.restarts += 1
        return Decision.AGAIN
