"""The life of the workers of an elastic run: started, heard, replaced, ended. On this host, or from the first of several.

Owns the order of things; who trains together is `membership`'s, what they are told `coordinator`'s, processes are `here`'s
and, on other hosts, their agents'. Runs in the main thread, where a signal may raise `Interrupted` anywhere.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.launch.elastic.coordinator import Coordinator
from phalanx.launch.elastic.hosts.gathering import FIRST, Hosts
from phalanx.launch.elastic.hosts.here import Here
from phalanx.launch.elastic.hosts.there import There
from phalanx.launch.elastic.membership import Limits
from phalanx.launch.hosts.channel import MALFORMED
from phalanx.launch.rendezvous import MEETING_S, Rendezvous
from phalanx.launch.supervise.team import Interrupted

SCALE_FILE = "scale"
"""In the run's folder: how many workers `phalanx scale` asks for."""

_LOOK_S = 0.2  # how often that is looked for; what a worker says, and its end, is noticed at once

Events = Callable[[dict[str, Any]], None]


class ElasticSupervisor:
    """Runs the workers to the end of their training, whoever of them is lost on the way."""

    def __init__(
        self,
        here: Here,
        limits: Limits,
        rendezvous: Rendezvous,
        grace_s: float,
        root: Path,
        events: Events,
        hosts: Hosts | None = None,
    ) -> None:
        """`hosts` are the others, where there may be any."""
        self._here, self._rendezvous, self._grace_s = here, rendezvous, grace_s
        self._events, self._scale_file = events, root / SCALE_FILE
        self._limits, self._hosts = limits, hosts
        # Not asked to start by it: how many it waits for is looked up when the event under way has been dealt with.
        self._coordinator = Coordinator(limits, lambda count: None, self._kill, self._wake, self._note, hosts)
        self._gives_back = False

    first_rank = 0

    @property
    def failure(self) -> str:
        """Why the run was given up, if it was."""
        return self._coordinator.failure

    @property
    def has_met(self) -> bool:
        """Whether workers ever trained together."""
        return self._coordinator.joins

    def run(self, before_start: Callable[[], None] = lambda: None) -> bool:
        """True when those who trained last ended well. Raises Interrupted; the workers have ended then, too."""
        before = signal.signal(signal.SIGUSR1, self._shrink)
        try:
            with self._here.team.ended_with(self._grace_s), self._others_told():
                place = self._rendezvous.next_round()
                before_start()
                self._here.begin(place)
                places = self._gather()
                # From here on: hosts may wait for each other longer than workers have to start.
                self._coordinator.begin(time.monotonic(), places)
                self._start()
                while not self._coordinator.is_over:
                    self._look()
                return not self._coordinator.failure
        finally:
            signal.signal(signal.SIGUSR1, before)
            if self._hosts is not None:
                self._hosts.close()
            self._coordinator.close()

    @contextlib.contextmanager
    def _others_told(self) -> Iterator[None]:
        """However the block ends, the other hosts are told how: before the workers here are, which may take a while."""
        words = "the first host's launcher failed"
        try:
            yield
            words = self._coordinator.failure
        except Interrupted as caught:
            words = f"the first host's launcher was ended by {caught.signal.name}"
            raise
        finally:
            if self._hosts is not None:
                self._hosts.end(words)

    def _gather(self) -> int | None:
        """Wait for the other hosts; how many workers all have places for, if there may be others."""
        if self._hosts is None:
            return None
        self._hosts.open()
        self._hosts.gather(MEETING_S)
        return self._hosts.places

    def _shrink(self, *_: object) -> None:
        # A batch system is about to take the host back, in part or soon. Not here: this is in the midst of anything.
        self._gives_back = True

    def _look(self) -> None:
        """Deal with what has happened, or wait for something to."""
        now = time.monotonic()
        deadline = self._coordinator.deadline
        wait_s = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - now))
        lines = {line.fileno(): worker for worker, line in self._coordinator.lines.items() if not line.is_closed}
        others = [] if self._hosts is None else self._hosts.descriptors
        poller = select.poll()
        for descriptor in (*lines, *others, *self._here.team.sentinels()):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(1000 * wait_s):
            if descriptor in lines:
                self._coordinator.hear(lines[descriptor], time.monotonic())
        for worker, exitcode in self._here.newly_ended().items():
            self._coordinator.ended(worker, exitcode == 0, time.monotonic(), exitcode)
            self._note({"event": "ended", "worker": worker, "code": exitcode})
        if self._hosts is not None:
            self._hear_hosts(self._hosts)
        now = time.monotonic()
        if self._coordinator.deadline is not None and now >= self._coordinator.deadline:
            self._coordinator.tick(now)
        self._look_for_scale()
        self._start()

    def _look_for_scale(self) -> None:
        if self._gives_back:
            self._gives_back = False
            self._coordinator.scale(self._limits.fewest, time.monotonic())
        try:
            wanted = int(self._scale_file.read_text())
            self._scale_file.unlink()
        except (OSError, ValueError):
            return
        self._coordinator.scale(wanted, time.monotonic())

    # -- other hosts ---------------------------------------------------------------------------

    def _hear_hosts(self, hosts: Hosts) -> None:
        for there, message in hosts.look(time.monotonic()):
            try:
                self._take(hosts, there, message)
            except MALFORMED as error:
                there.fault = there.fault or f"it said what nobody understands ({error!r})"

    def _take(self, hosts: Hosts, there: There, message: dict[str, Any]) -> None:
        now, worker = time.monotonic(), int(message.get("worker", -1))
        match message["is"]:
            case "came":
                self._note({"event": "host", "host": there.number, "name": there.name, "places": there.places})
                self._coordinator.host_came(there.places, hosts.places, now)
            case "said" if worker in there.lines:
                there.lines[worker].put(message["message"])
                self._coordinator.hear(worker, now)
            case "signs":
                for number, signs in message["signs"].items():
                    if int(number) in there.workers:
                        there.workers[int(number)].tell(*signs)
            case "pulse" if worker in there.workers and message["text"]:
                self._here.show_pulse(worker, str(message["text"]))
            case "started":
                self._note({"event": "started", "worker": worker, "pid": message["pid"], "host": there.number})
            case "ended" if worker in there.workers:
                code = None if message["code"] is None else int(message["code"])
                there.unseat(worker)
                if "why" in message:
                    self._note({"event": "not started", "worker": worker, "why": str(message["why"])})
                self._coordinator.ended(worker, code == 0, now, code)
                self._note({"event": "ended", "worker": worker, "code": code})
            case "bye":
                why = f"with its host, {there}: {message['words']}"
                self._note({"event": "host lost", "host": there.number, "why": str(message["words"])})
                self._coordinator.host_lost(list(there.workers), hosts.places, why, now, there.number)

    def _kill(self, worker: int, why: str) -> None:
        self._do_there(worker, "kill")
        self._here.team.kill_one(worker, why)

    def _wake(self, worker: int) -> None:
        self._do_there(worker, "wake")
        self._here.team.wake_one(worker)

    def _do_there(self, worker: int, what: str) -> None:
        for there in self._hosts.all.values() if self._hosts is not None else ():
            if worker in there.workers:
                there.send({"do": what, "worker": worker})

    # -- starting ------------------------------------------------------------------------------

    def _start(self) -> None:
        while self._coordinator.membership.asked:
            there = None
            if self._hosts is not None and self._coordinator.joins and not self._here.is_empty:
                # A host without workers first: it may keep what nobody else has, and only its own worker can give it.
                there = self._hosts.empty()
            if self._hosts is not None and there is None and self._here.num_free <= 0:
                there = self._hosts.place()
                if there is None:
                    return  # until a place is free, or a host comes
            if there is None:
                self._start_here()
            else:
                self._start_there(there)

    def _start_here(self) -> None:
        joins = self._coordinator.joins
        worker, theirs = self._coordinator.connect(time.monotonic())
        if self._hosts is not None:
            self._hosts.settle(worker, FIRST)
        try:
            pid = self._here.start(worker, theirs, self._coordinator.variables(worker, theirs, joins))
            self._note({"event": "started", "worker": worker, "pid": pid})
        except OSError as error:
            self._note({"event": "not started", "worker": worker, "why": str(error)})
            self._coordinator.ended(worker, False, time.monotonic())
        finally:
            theirs.close()

    def _start_there(self, there: There) -> None:
        assert self._hosts is not None, "it is one of them"
        joins = self._coordinator.joins
        worker = self._coordinator.connect_far(time.monotonic(), there.seat, there.number)
        self._hosts.settle(worker, there.number)
        there.send({"do": "start", "worker": worker, "joins": joins})

    def _note(self, record: dict[str, Any]) -> None:
        self._events({"at_ns": time.time_ns(), **record})
