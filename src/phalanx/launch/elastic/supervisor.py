"""The life of the workers of an elastic run on this host: started, heard, replaced, ended.

Owns the order of things; who trains together is `membership`'s, what they are told `coordinator`'s, processes are `team`'s.
Runs in the main thread, where a signal may raise `Interrupted` anywhere.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.launch.elastic.coordinator import Coordinator
from phalanx.launch.elastic.membership import Limits
from phalanx.launch.logs import RankLogs
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.start.order import Order
from phalanx.launch.supervise.numbering import Round, variables
from phalanx.launch.supervise.supervisor import Crew, standard_input
from phalanx.launch.supervise.team import Team

SCALE_FILE = "scale"
"""In the run's folder: how many workers `phalanx scale` asks for."""

_LOOK_S = 0.2  # how often that is looked for; what a worker says, and its end, is noticed at once

Events = Callable[[dict[str, Any]], None]


class ElasticSupervisor:
    """Runs the workers to the end of their training, whoever of them is lost on the way."""

    def __init__(
        self, crew: Crew, team: Team, limits: Limits, rendezvous: Rendezvous, logs: RankLogs, root: Path, events: Events
    ) -> None:
        self._crew, self._team, self._rendezvous, self._logs = crew, team, rendezvous, logs
        self._events, self._scale_file = events, root / SCALE_FILE
        self._limits = limits
        self._round: Round | None = None
        self._coordinator = Coordinator(limits, self._ask, self._team.kill_one, self._team.wake_one, self._note)
        self._slots: dict[int, int] = {}  # which place on this host (a core, a GPU) each worker has
        self._gives_back = False
        self._asked = 0  # workers to be started when the event under way has been dealt with

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
            with self._team.ended_with(self._crew.grace_s):
                self._round = self._rendezvous.next_round()
                before_start()
                self._logs.begin_attempt()
                self._coordinator.begin(time.monotonic())
                self._start()
                while not self._coordinator.is_over:
                    self._look()
                return not self._coordinator.failure
        finally:
            signal.signal(signal.SIGUSR1, before)
            self._coordinator.close()

    def _shrink(self, *_: object) -> None:
        # A batch system is about to take the host back, in part or soon. Not here: this is in the midst of anything.
        self._gives_back = True

    def _look(self) -> None:
        """Deal with what has happened, or wait for something to."""
        now = time.monotonic()
        deadline = self._coordinator.deadline
        wait_s = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - now))
        lines = {line.fileno(): worker for worker, line in self._coordinator.lines.items() if not line.is_closed}
        poller = select.poll()
        for descriptor in (*lines, *self._team.sentinels()):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(1000 * wait_s):
            if descriptor in lines:
                self._coordinator.hear(lines[descriptor], time.monotonic())
        for worker, exitcode in self._team.newly_ended().items():
            self._slots.pop(worker, None)
            self._coordinator.ended(worker, exitcode == 0, time.monotonic(), exitcode)
            self._note({"event": "ended", "worker": worker, "code": exitcode})
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

    # -- starting ------------------------------------------------------------------------------

    def _ask(self, count: int) -> None:
        # Not now: the coordinator is in the midst of something, and starting tells it of it.
        self._asked += count

    def _start(self) -> None:
        while self._asked:
            self._asked -= 1
            joins = self._coordinator.joins
            worker, theirs = self._coordinator.connect(time.monotonic())
            try:
                self._team.start({worker: self._order(worker, theirs, joins)})
                self._note({"event": "started", "worker": worker, "pid": self._team.pid(worker)})
            except OSError as error:
                self._note({"event": "not started", "worker": worker, "why": str(error)})
                self._coordinator.ended(worker, False, time.monotonic())
            finally:
                theirs.close()

    def _order(self, worker: int, theirs: socket.socket, joins: bool) -> Order:
        assert self._round is not None, "workers are started in a round"
        crew = self._crew
        environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}
        taken = set(self._slots.values())
        slot = self._slots[worker] = next(slot for slot in itertools.count() if slot not in taken)
        places = max(self._limits.most, slot + 1)
        environ |= variables(self._round, slot, places, self._rendezvous.run_id, 0, 0)
        # Its number among all that were ever started, by which its files are named. Ranks are told at the meeting.
        environ |= {"RANK": str(worker), "WORLD_SIZE": str(max(self._limits.most, worker + 1))}
        environ |= self._coordinator.variables(worker, theirs, joins)
        self._rendezvous.prepare(environ)
        stdout, stderr = self._logs.prepare(environ)
        return Order(crew.command, environ, stdout, stderr, stdin=standard_input(), kept=(theirs.fileno(),))

    def _note(self, record: dict[str, Any]) -> None:
        self._events({"at_ns": time.time_ns(), **record})
