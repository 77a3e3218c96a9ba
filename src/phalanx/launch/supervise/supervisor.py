"""The life of the workers on this host: started in rounds, watched, started again, ended.

Owns the order of things. What to do when a worker ends is `policy`'s, processes are `team`'s, which hosts take part is
`rendezvous`'s, where output goes is `logs`'s. Runs in the main thread, where a signal may raise `Interrupted` anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

from phalanx.launch.logs import RankLogs
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.start.order import Order
from phalanx.launch.supervise.numbering import Round, variables
from phalanx.launch.supervise.policy import Decision, Ended, HostsChanged, Policy, Started
from phalanx.launch.supervise.team import HANDLED, Interrupted, Team

# How often other hosts are asked after; the end of a worker is noticed at once.
_LOOK_S = 0.05


@dataclass(frozen=True)
class Crew:
    """What is the same for every start of the workers."""

    command: tuple[str, ...]
    nproc: int
    max_restarts: int
    grace_s: float


class Supervisor:
    """Runs the workers of one host to their end."""

    def __init__(self, crew: Crew, team: Team, policy: Policy, rendezvous: Rendezvous, logs: RankLogs) -> None:
        self._crew = crew
        self._team = team
        self._policy = policy
        self._rendezvous = rendezvous
        self._logs = logs
        self._round: Round | None = None

    def run(self, before_start: Callable[[], None] = lambda: None) -> bool:
        """True when every worker ended well. Raises Interrupted and HostsEnded; the workers have ended then, too.

        `before_start` is called in each round once the hosts have met, before workers are started.
        """
        with self._team.ended_with(self._crew.grace_s):
            self._begin_round(before_start)
            while (decision := self._next()) is Decision.AGAIN:
                self._team.end(signal.SIGTERM, self._crew.grace_s)
                self._begin_round(before_start)
            if decision is Decision.FINISHED:
                self._rendezvous.wait_for_others()
            return decision is Decision.FINISHED

    @property
    def first_rank(self) -> int:
        """The rank of this host's first worker in the latest round."""
        return self._round.first_rank if self._round is not None else 0

    def _begin_round(self, before_start: Callable[[], None]) -> None:
        self._round = self._rendezvous.next_round()
        before_start()
        self._start(range(self._crew.nproc))

    def _start(self, local_ranks: Iterable[int]) -> None:
        assert self._round is not None, "workers are started in a round"
        crew, orders = self._crew, {}
        self._logs.begin_attempt()
        for local_rank in local_ranks:
            numbers = variables(
                self._round, local_rank, crew.nproc, self._rendezvous.run_id, self._policy.restarts, crew.max_restarts
            )
            environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **numbers}
            self._rendezvous.prepare(environ)
            stdout, stderr = self._logs.prepare(environ)
            orders[local_rank] = Order(crew.command, environ, stdout, stderr, stdin=standard_input())
        self._team.start(orders)
        self._logs.started()
        for local_rank in orders:
            self._policy.hear(Started(local_rank))

    def _next(self) -> Decision:
        """Watch until there is something to do about it."""
        while True:
            self._team.wait(_LOOK_S)
            for local_rank, exitcode in self._team.newly_ended().items():
                self._rendezvous.note_end(self.first_rank + local_rank, exitcode)
                decision = self._policy.hear(Ended(local_rank, exitcode))
                if decision is Decision.REPLACE:
                    self._start([local_rank])
                elif decision is not Decision.GO_ON:
                    return decision
            if self._rendezvous.num_hosts_waiting() > 0:
                return self._policy.hear(HostsChanged())


def standard_input() -> int | None:
    """What workers read from: ours, if there is one."""
    try:
        os.fstat(0)
    except OSError:
        return None
    return 0


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block a signal that should end the launcher is the exception `Interrupted`."""
    # Started with nohup: it is to go on when its terminal is closed.
    handled = [number for number in HANDLED if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    handlers = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
