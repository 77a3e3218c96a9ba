"""The launcher's side of the meeting: it hears workers, asks `Membership` what to do, and does it.

Owns the sockets to the workers and the pages it shares with them, the files in which their state outlives them, and the
store of each generation. Starting and ending processes is its owner's business: it is told what to do, and tells what has
become of it. Workers of other hosts have a line and a page that lead there (`hosts.there`), and are no others otherwise.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.launch.elastic.actions import Action, Break, Dismiss, Form, GiveUp, Kill, Pause, Preserve, Start, Wake
from phalanx.launch.elastic.heads import VOID
from phalanx.launch.elastic.hosts.here import variables_of
from phalanx.launch.elastic.hosts.shelf import Shelf
from phalanx.launch.elastic.membership import Limits, Membership, RunState
from phalanx.launch.elastic.messages import Line
from phalanx.launch.elastic.page import Page
from phalanx.launch.elastic.silence import LONGEST_LOOK_S, Signs, Silence
from phalanx.launch.store import RunStore

_LOOK_S = 0.25  # how often the workers' signs of life are looked at
_STRAGGLES_S = 10.0  # one that all others have waited for, for so long, is named
_TOLD = ("lost", "fenced", "left", "scale", "awaits", "forming")
"""Records that whoever goes on is told of: why its ranks are others than before."""

_TOLD_AT_ONCE = ("straggler", "woken")
"""Records that are told to those who train, since nothing changes by them."""


class SpeakingLine(Protocol):
    """A line to a worker, here or on another host."""

    def send(self, message: dict[str, Any]) -> None: ...

    def receive(self) -> dict[str, Any] | None: ...

    def close(self) -> None: ...


class SharedPage(Signs, Protocol):
    """A worker's page, here or on another host."""

    def end_generation(self, generation: int, by: int) -> None: ...

    def close(self) -> None: ...


class Elsewhere(Protocol):
    """The other hosts, of a run that may have several."""

    def host_of(self, worker: int) -> int: ...

    def name_of(self, host: int) -> str | None: ...

    def open_store(self) -> str: ...

    def forget_before(self, generation: int) -> None: ...


@dataclass
class Generation:
    """What the launcher keeps for one generation, beside its files."""

    number: int
    members: tuple[int, ...]
    store: RunStore

    def close(self) -> None:
        self.store.close()


class Coordinator:
    """One elastic run. Not for several threads: the launcher's loop calls it."""

    def __init__(
        self,
        limits: Limits,
        start: Callable[[int], None],
        kill: Callable[[int, str], None],
        wake: Callable[[int], None],
        notice: Callable[[dict[str, Any]], None],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`start(count)` asks for workers, which `connect` announces; `kill(worker, why)` must be certain to end it, and
        `wake(worker)` lets it go on if it was stopped."""
        self.membership = Membership(limits)
        self._start, self._kill, self._wake, self._notice = start, kill, wake, notice
        self._elsewhere = elsewhere
        self._lines: dict[int, SpeakingLine] = {}
        self._pages: dict[int, SharedPage] = {}
        self._shelf = Shelf()
        self._silence, self._looks_at, self._ticked_at = Silence(limits.silence_s), 0.0, 0.0
        self._generations: list[Generation] = []
        self._next_worker = 0
        self._has_committed = False
        self._has_trained: set[int] = set()  # workers of any generation so far
        self._started_at: dict[int, float] = {}
        self._fenced: set[int] = set()  # ended by our own hand: no news when their processes do
        self._since: list[dict[str, Any]] = []  # records since the ranks went on last; told to those who go on next
        self._awaited: tuple[int, ...] = ()  # the generation and the hosts of which it was noted that they are waited for
        self.failure = ""
        """Why the run was given up, if it was."""

    # -- what the launcher's loop needs --------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.membership.state is RunState.OVER

    @property
    def deadline(self) -> float | None:
        """When `tick` is due."""
        due = self.membership.deadline
        return self._looks_at if due is None else min(due, self._looks_at)

    @property
    def lines(self) -> dict[int, Line]:
        """The sockets to listen to, by worker: those of this host."""
        return {worker: line for worker, line in self._lines.items() if isinstance(line, Line)}

    @property
    def joins(self) -> bool:
        """Whether a worker that is started now comes to others who train."""
        return self.membership.generation > 0

    def begin(self, now: float, places: int | None = None) -> None:
        self._ticked_at = now
        self._do(self.membership.begin(now, places))

    def connect(self, now: float) -> tuple[int, socket.socket]:
        """A worker is about to be started: its number, and its end of the socket, for the caller to hand over and close."""
        ours, theirs = socket.socketpair()
        page = Page.make(f"page-{self._next_worker}")
        return self.connect_far(now, lambda _: (Line(ours), page)), theirs

    def connect_far(self, now: float, seat: Callable[[int], tuple[SpeakingLine, SharedPage]], host: int = 0) -> int:
        """A worker is about to be started on another host: its number. `seat` gives its line and its page."""
        worker, self._next_worker = self._next_worker, self._next_worker + 1
        self._started_at[worker] = now
        self._lines[worker], self._pages[worker] = seat(worker)
        self._do(self.membership.started(worker, now, host))
        return worker

    def variables(self, worker: int, theirs: socket.socket, joins: bool) -> dict[str, str]:
        """By which a worker that is about to be started finds this coordinator."""
        page = self._pages[worker]
        assert isinstance(page, Page), "it is started on this host"
        return variables_of(worker, page, theirs, joins)

    def could_not_start(self, why: str, now: float) -> None:
        self._do(self.membership.could_not_start(why, now))

    def ended(self, worker: int, well: bool, now: float, code: int | None = None) -> None:
        """A worker's process has ended, with this exit code."""
        self.hear(worker, now)  # what it said last, before it is forgotten
        self._forget(worker)
        # Before anything is done about it: those who go on are told why.
        if self._rank_of(worker) is not None and not well and worker not in self._fenced:
            self._note("lost", worker, code=code)
        self._do(self.membership.ended(worker, well, now))

    def _forget(self, worker: int) -> None:
        line, page = self._lines.pop(worker, None), self._pages.pop(worker, None)
        if line is not None and page is not None:
            line.close()
            page.close()

    def host_came(self, brought: int, places: int, now: float) -> None:
        """A host has joined, with room for so many workers; now there are `places`."""
        self._do(self.membership.host_came(brought, places, now))

    def host_lost(
        self, workers: Collection[int], places: int, why: str, now: float, host: int | None = None
    ) -> None:
        """A host is gone with these workers; what is left has room for so many."""
        for worker in workers:
            self.hear(worker, now)
            self._forget(worker)
            if self._rank_of(worker) is not None and worker not in self._fenced:
                self._note("lost", worker, code=None, why=why)
            else:
                self._note("ended", worker, code=None)
        self._do(self.membership.host_lost(workers, places, now, host))

    def hear(self, worker: int, now: float) -> None:
        """Take what a worker has said."""
        line = self._lines.get(worker)
        message = None if line is None else line.receive()
        while line is not None and message is not None:
            self._take(worker, message, now)
            message = line.receive()

    def tick(self, now: float) -> None:
        # Called several times a second, unless this process was stopped; as likely as not its workers were, too.
        self.membership.postpone(max(0.0, now - self._ticked_at - LONGEST_LOOK_S))
        self._ticked_at = now
        if now >= self._looks_at:
            self._looks_at = now + _LOOK_S
            self._look_for_signs(now)
        due = self.membership.deadline
        if due is not None and now >= due:
            self._do(self.membership.tick(now))

    def _look_for_signs(self, now: float) -> None:
        silent = self._silence.look(self._pages, now)
        if silent:
            self._do(self.membership.silent(silent, now))
        late = self._silence.straggler(self._pages, self.membership.members, _STRAGGLES_S)
        if late is not None and self.membership.state is RunState.RUNNING:
            self._note("straggler", late[0], seconds=round(late[1], 1))

    def scale(self, wanted: int, now: float) -> None:
        """Train with so many workers from now on."""
        self._note("scale", wanted=wanted)
        self._do(self.membership.scale(wanted, now))

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        for page in self._pages.values():
            page.close()
        self._lines, self._pages = {}, {}
        for generation in self._generations:
            generation.close()
        self._generations = []
        self._shelf.close()

    # -- in ------------------------------------------------------------------------------------

    def _take(self, worker: int, message: dict[str, Any], now: float) -> None:
        kind, current = message.get("is"), self.membership
        if kind == "arrived":
            if message.get("timeout_s"):
                self._silence.lower_limit(message["timeout_s"])
            # A member that comes after its generation was replaced has been given up; `Membership` says so.
            self._do(current.arrived(worker, now, self._may_be_fenced(message.get("silent", ()))))
        elif kind == "committed":
            self._has_committed = True
            self._do(current.committed(now))
            self._note("gets on", step=message["version"])
            self._forget_old()
        elif kind == "pausing":
            for other in current.members:
                if other != worker and other in self._lines:
                    self._lines[other].send({"is": "pause", "at": message["at"]})
        elif kind == "leaving":
            self._do(current.wants_to_leave(worker, now))
        elif kind == "preserved":
            self._shelf.preserved(message["generation"], worker)
        elif kind == "lost state":
            self._lost_state(message.get("absent", ()), now)
        elif kind == "event":
            facts = {key: value for key, value in message.items() if key not in ("is", "what")}
            self._note(message.get("what", ""), worker, **facts)
            if message.get("what") == "formed":
                self._forget_told(facts["generation"])

    def _may_be_fenced(self, silent: Sequence[int]) -> list[int]:
        """Of members that another one has waited for in vain, those that can be ended for certain. One elsewhere may be
        behind a network that is gone: a shorter time limit than the hosts' own says nothing of it."""
        limit_s = self._silence.limit_s
        return [one for one in silent if one not in self._pages or limit_s >= self._pages[one].least_s]

    def _lost_state(self, absent: Collection[int], now: float) -> None:
        """No member has it, nor a mirror. `absent`: the hosts without a member that were of the generations before."""
        named = {} if self._elsewhere is None else {host: self._elsewhere.name_of(host) for host in absent}
        there = {host: name for host, name in named.items() if name is not None}
        actions = self.membership.needs_hosts(there, now)
        if there and not actions and self._awaited != (self._number, *there):
            self._awaited = (self._number, *there)
            self._note("awaits", hosts=list(there), names=list(there.values()), limit_s=self.membership.limits.start_s)
        self._do(actions)

    # -- out -----------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(count):
                    self._start(count)
                case Kill(worker, why):
                    self._fenced.add(worker)
                    self._note("fenced", worker, why=why)
                    self._kill(worker, why)
                case Wake(worker):
                    self._note("woken", worker)
                    self._wake(worker)
                case Break(number, members, by):
                    for worker in members:
                        if worker in self._pages:
                            self._pages[worker].end_generation(number, members.index(by))
                case Pause():
                    first = self.membership.members[0]
                    if first in self._lines:
                        self._lines[first].send({"is": "pause"})
                case Form(number, members):
                    self._form(number, members)
                case Dismiss(worker):
                    self._note("left", worker)
                    if worker in self._lines:
                        self._lines[worker].send({"is": "dismiss"})
                case Preserve(worker):
                    # Between hosts the ranks find out who has what; they know of no such copy.
                    if self._elsewhere is None and worker in self._lines:
                        self._lines[worker].send({"is": "preserve"})
                case GiveUp(why):
                    self.failure = why

    def _note(self, what: str, worker: int | None = None, **facts: Any) -> None:
        """Something has happened: for the run's record, and for whoever goes on."""
        record = {"at_ns": time.time_ns(), "event": what, "generation": self._number}
        if worker is not None:
            record |= {"worker": worker, "rank": self._rank_of(worker)}
        record |= facts
        if what in _TOLD:
            self._since.append(record)
        elif what in _TOLD_AT_ONCE:
            for member in self.membership.members:
                if member in self._lines:
                    self._lines[member].send({"is": "note", "record": record})
        self._notice(record)

    @property
    def _number(self) -> int:
        return self._generations[-1].number if self._generations else 0

    def _rank_of(self, worker: int) -> int | None:
        """In the newest generation that was formed. Not `membership`'s: it is ahead of what has been done."""
        members = self._generations[-1].members if self._generations else ()
        return members.index(worker) if worker in members else None

    def _forget_told(self, number: int) -> None:
        """The members of this generation know all that came before it."""
        formed = [at for at, one in enumerate(self._since) if one["event"] == "forming" and one["generation"] == number]
        if formed:
            del self._since[: formed[0] + 1]

    def _form(self, number: int, members: tuple[int, ...]) -> None:
        there, now = self._generations[-1].members if self._generations else (), time.monotonic()
        came = [[worker, round(now - self._started_at[worker], 3)] for worker in members if worker not in there]
        before = self._before()
        nobody_knows = before["version"] == VOID and not self._has_trained & set(members)
        if self._elsewhere is None and self._has_committed and nobody_knows:
            self._do(self.membership.lost_state())
            return
        self._has_trained.update(members)
        made = Generation(number, members, RunStore())
        path = made.store.renew() if self._elsewhere is None else self._elsewhere.open_store()
        self._generations.append(made)
        hosts = [] if self._elsewhere is None else [self._elsewhere.host_of(worker) for worker in members]
        self._shelf.make(number, members, hosts)
        self._note("forming", members=list(members), came=came)
        message = {"is": "form", "generation": number, "members": members, "store": path, "hosts": hosts, **before}
        message |= {"has_committed": self._has_committed, "since": self._since}
        for rank, worker in enumerate(members):
            line = self._lines.get(worker)
            if line is None:
                continue  # it has ended since; its generation will notice
            # Where the state is kept: of this host. Another's launcher tells its own workers.
            line.send({**message, "rank": rank, **(self._shelf.told() if isinstance(line, Line) else {})})

    def _before(self) -> dict[str, Any]:
        """From which generation's state the next one goes on. On several hosts its ranks find that out themselves."""
        kept = [] if self._elsewhere is not None else self._shelf.generations
        before = next((one for one in reversed(kept) if one.version() != VOID), None)
        if before is None:
            return {"before": [], "members_before": [], "version": VOID}
        return {"before": before.paths, "members_before": before.members, "version": before.version()}

    def _forget_old(self) -> None:
        """A generation that gets on needs nothing of those before it."""
        for generation in self._generations[:-1]:
            generation.close()
        del self._generations[:-1]
        self._shelf.forget_before(self._number)
        if self._elsewhere is not None:
            self._elsewhere.forget_before(self._number)
