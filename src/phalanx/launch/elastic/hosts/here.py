"""The workers of this host, as its launcher starts them: their places, environment and files of output.

The same on the first host and on every other. Must not know who decides that a worker is started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

from phalanx.launch.elastic.page import Page
from phalanx.launch.elastic.variables import HOSTS, JOINS, NUMBER, PAGE, SOCKET
from phalanx.launch.logs import RankLogs
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.rundir import open_private
from phalanx.launch.start.order import Order
from phalanx.launch.supervise.numbering import Round, variables
from phalanx.launch.supervise.supervisor import Crew, standard_input
from phalanx.launch.supervise.team import Team

_MOST_PULSE = 10_000


def variables_of(worker: int, page: Page, theirs: socket.socket, joins: bool) -> dict[str, str]:
    """By which a worker that is about to be started finds its launcher."""
    return {SOCKET: str(theirs.fileno()), PAGE: page.path, NUMBER: str(worker), JOINS: str(int(joins))}


class Here:
    """Owns which place (a core, a GPU) each worker has. `most` is how many workers the run may have."""

    def __init__(self, crew: Crew, team: Team, rendezvous: Rendezvous, logs: RankLogs, most: int, spans_hosts: bool) -> None:
        self.team = team
        self._crew, self._rendezvous, self._logs = crew, rendezvous, logs
        self._most, self._spans_hosts = most, spans_hosts
        self._slots: dict[int, int] = {}
        self._round: Round | None = None

    def begin(self, place: Round) -> None:
        """Workers are about to be started for the first time."""
        self._round = place
        self._logs.begin_attempt()

    @property
    def num_free(self) -> int:
        """How many more workers have a place. One that was killed has its own until it is seen to have ended."""
        return self._crew.nproc - len(self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether this host has no worker."""
        return not self._slots

    def start(self, worker: int, theirs: socket.socket, said: dict[str, str]) -> int:
        """Start a worker, which is told `said`; returns its process id. Raises OSError."""
        try:
            self.team.start({worker: self._order(worker, theirs, said)})
        except OSError:
            self._slots.pop(worker, None)
            raise
        finally:
            self._logs.started()
        return self.team.pid(worker)

    def newly_ended(self) -> dict[int, int]:
        """Exit codes of workers that have ended since this was asked last."""
        found = self.team.newly_ended()
        for worker in found:
            self._slots.pop(worker, None)
        return found

    def pulse(self, worker: int) -> str:
        """What a worker of this host says that it is doing, as it is written in its folder; empty before it has."""
        try:
            return self._logs.files(worker).status.read_text()[:_MOST_PULSE]
        except OSError:
            return ""

    def show_pulse(self, worker: int, text: str) -> None:
        """What a worker of another host says that it is doing, for who looks at this host's folder (`phalanx top`)."""
        path = self._logs.files(worker).status
        with contextlib.suppress(OSError):  # a full disk; the run goes on without
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            with open(open_private(fresh), "w") as file:
                file.write(text[:_MOST_PULSE])
            fresh.replace(path)

    def _order(self, worker: int, theirs: socket.socket, said: dict[str, str]) -> Order:
        assert self._round is not None, "workers are started in a round"
        environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}
        taken = set(self._slots.values())
        slot = self._slots[worker] = next(slot for slot in itertools.count() if slot not in taken)
        places = max(self._crew.nproc if self._spans_hosts else self._most, slot + 1)
        environ |= variables(self._round, slot, places, self._rendezvous.run_id, 0, 0)
        # Its number among all that were ever started, by which its files are named. Ranks are told at the meeting.
        environ |= {"RANK": str(worker), "WORLD_SIZE": str(max(self._most, worker + 1))}
        environ |= {HOSTS: str(int(self._spans_hosts)), **said}
        self._rendezvous.prepare(environ)
        stdout, stderr = self._logs.prepare(environ)
        return Order(self._crew.command, environ, stdout, stderr, stdin=standard_input(), kept=(theirs.fileno(),))
