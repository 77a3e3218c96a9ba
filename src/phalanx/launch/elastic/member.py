"""A worker's side of the meeting: it says that it is there, and is told who else is.

Owns the socket to the coordinator, and the signs of life. Must not know of models, nor how groups are made.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import StateError
from phalanx.launch.elastic.heads import Paths
from phalanx.launch.elastic.hosts.cutting import Cutter
from phalanx.launch.elastic.messages import Line
from phalanx.launch.elastic.page import GenerationOver, Heart, Page
from phalanx.launch.elastic.variables import HOSTS, JOINS, NUMBER, PAGE, SOCKET
from phalanx.observe.live.pulse import WAITING, pulse

_STEPS_AHEAD = 2
LEAVE = signal.SIGUSR1


class Dismissed(SystemExit):
    """This worker is not needed any more, and ends well."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Kept:
    """A generation before, of which this host keeps files."""

    generation: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]
    images: tuple[Paths, ...]
    """By rank; `NOWHERE` of those that are not kept here."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Kept:
        images = tuple(Paths.of(one) for one in value["images"])
        return cls(value["generation"], tuple(value["members"]), tuple(value["hosts"]), images)


@dataclass(frozen=True)
class Formed:
    """A generation, as one of its members is told of it."""

    generation: int
    rank: int
    members: tuple[int, ...]
    """The numbers of the workers, by rank."""
    store: str
    images: tuple[Paths, ...]
    """Where the members keep their state, by rank."""
    before: tuple[Paths, ...]
    """Where the state is that they start from; empty if there is none yet."""
    members_before: tuple[int, ...]
    """Who wrote that, by rank."""
    version: int
    """Which version of it; VOID if there is none."""
    has_committed: bool
    """Whether any generation has completed a step."""
    since: tuple[dict[str, Any], ...] = ()
    """What has happened since ranks of this run went on last, as `story` reads it."""
    hosts: tuple[int, ...] = ()
    """The host of each rank; empty in a run on one host. On several, `images` are those that are kept here, and `before` is
    what the ranks find out from each other (`elastic.hosts`)."""
    kept: tuple[Kept, ...] = ()
    """On several hosts: what is kept here of generations before, the oldest first."""

    @property
    def world(self) -> int:
        return len(self.members)

    @property
    def local(self) -> tuple[int, int]:
        """This rank's number among those of its host, and how many they are."""
        if not self.hosts:
            return self.rank, self.world
        here = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        return here.index(self.rank), len(here)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Formed:
        return cls(
            message["generation"],
            message["rank"],
            tuple(message["members"]),
            message["store"],
            tuple(Paths.of(one) for one in message["images"]),
            tuple(Paths.of(one) for one in message["before"]),
            tuple(message["members_before"]),
            message["version"],
            message["has_committed"],
            tuple(message.get("since", ())),
            tuple(message.get("hosts", ())),
            tuple(Kept.of(one) for one in message.get("kept", ())),
        )


class Member:
    """This process, as the coordinator knows it."""

    def __init__(self, line: Line, page: Page, number: int, joins: bool, spans_hosts: bool = False) -> None:
        self._line, self._page, self.number, self.joins = line, page, number, joins
        self.spans_hosts = spans_hosts
        """Whether there may be ranks on other hosts."""
        self._cutter = Cutter() if spans_hosts else None
        self.formed: Formed | None = None
        self.timeout_s: float | None = None
        """The time limit of this worker's groups; the launcher gives nobody more than that to show a sign of life."""
        self.has_trained = False
        """Whether a training function was called here."""
        self._pause_at: int | None = None
        self._has_told = False  # whether the coordinator knows that this generation gets on
        self._wants_to_leave = False
        self._notes: list[dict[str, Any]] = []

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Member | None:
        """The member that this process was started as; None outside of an elastic run."""
        descriptor = environ.get(SOCKET)
        if not descriptor:
            return None
        connection = socket.socket(fileno=int(descriptor))
        # Not for the processes that this one starts: data loaders, compilers.
        os.set_inheritable(connection.fileno(), False)
        page = Page.open(environ[PAGE])
        Heart(page, lambda: pulse.state == WAITING)
        return cls(Line(connection), page, int(environ[NUMBER]), environ.get(JOINS) == "1", environ.get(HOSTS) == "1")

    @property
    def interruption(self) -> GenerationOver:
        """Knows when the generation that this worker is in is over."""
        assert self.formed is not None, "it is a member of a generation"
        return GenerationOver(self._page, self.formed.generation, self.formed.rank)

    def meet(
        self, why: str = "", silent_ranks: Sequence[int] = (), preserve: Callable[[], int | None] = lambda: None
    ) -> Formed:
        """Come to the meeting and wait until the next generation is formed. Raises Dismissed if without this worker.

        `preserve` is called if this one is the last of its generation and waits for others: it writes what it holds, and
        returns the version.
        """
        before = self.formed
        silent = [] if before is None else [before.members[rank] for rank in silent_ranks if rank < before.world]
        generation = 0 if before is None else before.generation
        limit = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        self._line.send({"is": "arrived", "generation": generation, "silent": silent, "why": why, **limit})
        while True:
            message = self._line.receive(None)
            if message is None:
                raise StateError("the launcher of this elastic run has ended. Start the run again.")
            if message["is"] == "dismiss":
                raise Dismissed
            if message["is"] == "preserve" and (version := preserve()) is not None:
                self._line.send({"is": "preserved", "generation": generation, "version": version})
            if message["is"] == "form":
                self._pause_at, self._has_told = None, False
                self.formed = Formed.of(message)
                if self._cutter is not None:
                    self._cutter.watch(self.interruption)
                return self.formed

    def committed(self, version: int) -> bool:
        """A step has been committed. Whether this is where the generation is to pause."""
        assert self.formed is not None, "it is a member of a generation"
        if self.formed.rank == 0 and not self._has_told:
            self._has_told = True
            self._line.send({"is": "committed", "version": version})
        if self._wants_to_leave:
            self._wants_to_leave = False
            self._line.send({"is": "leaving"})
        message = self._line.receive()
        while message is not None:
            if message["is"] == "pause":
                # Rank 0 says when: far enough ahead for the others to hear of it before they are there. Should one not
                # hear in time, its next collective fails, and it undoes that step.
                at = message.get("at")
                if at is None:
                    at = version + _STEPS_AHEAD
                    self._line.send({"is": "pausing", "at": at})
                self._pause_at = int(at)
            elif message["is"] == "note":
                self._notes.append(message["record"])
            message = self._line.receive()
        return self._pause_at is not None and version >= self._pause_at

    def leave(self) -> None:
        """Ask, when the step under way is done, to be left out of the next generation. Safe in a signal's handler."""
        self._wants_to_leave = True

    def leave_on_signal(self) -> None:
        """From now on SIGUSR1, which batch systems send before they take a node back, lets this worker leave after the step
        it is in. A handler of the script's own is left alone."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(LEAVE) is signal.SIG_DFL:
            signal.signal(LEAVE, lambda *_: self.leave())

    def take_notes(self) -> list[dict[str, Any]]:
        """What has happened meanwhile without a change of ranks."""
        taken, self._notes = self._notes, []
        return taken

    def lost_state(self, absent: Sequence[int]) -> None:
        """No rank has what was learnt, nor a mirror of it. `absent` are hosts without a rank whose launchers may have it."""
        self._line.send({"is": "lost state", "absent": list(absent)})

    def tell(self, what: str, **facts: Any) -> None:
        """Something that the run's record should have."""
        self._line.send({"is": "event", "what": what, **facts})
