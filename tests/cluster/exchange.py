"""Conducts one call on several worker processes, and says how it ended on each rank.

Shared by the pool and by fresh processes, which differ in what they do with the outcome.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from tests.cluster.call import Call, Clean, Raised, Release, Returned, StoreAt, StorePort
from tests.cluster.process import RankProcess

# How many times as long a hang may last where other workers (tests/schedule.py) have the processors as well.
PATIENCE = 3 if "PYTEST_XDIST_WORKER" in os.environ else 1
# For ranks that returned, to destroy their group and look for leaks.
LEAVE_S = 10.0 * PATIENCE


class RankState(enum.Enum):
    """Where a rank is in a call; the value completes the sentence "rank 1 ..."."""

    RUNNING = "is running"
    RETURNED = "returned but did not leave its group"
    LEFT = "returned and left its group"
    RAISED = "raised"
    DIED = "died"
    OVERRAN = "did not finish in time and was killed"


@dataclass
class RankProgress:
    """How far one rank got; `error_text` is its traceback, its stacks or what is known of its end."""

    rank: int
    process: RankProcess
    state: RankState = RankState.RUNNING
    value: Any = None
    error_text: str | None = None
    seconds: float = 0.0
    leaks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CallRequest:
    """What a test asked for; the same on every rank."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    backend: str | None
    pg_timeout_s: float
    seed: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    allowed_leaks: Collection[str] = ()
    fresh: bool = False


class Exchange:
    """One call in flight on `processes`, one a rank.

    `grace_s` is how long the others may go on once a rank has failed; None lets them have all of
    `timeout_s`. `failed` lists the ranks that raised, died or overran, first to fail first.
    """

    def __init__(self, processes: Sequence[RankProcess], timeout_s: float, grace_s: float | None) -> None:
        self.ranks = [RankProgress(rank, process) for rank, process in enumerate(processes)]
        self.failed: list[RankProgress] = []
        self._grace_s = grace_s
        self._started = time.monotonic()
        self._deadline = self._started + PATIENCE * timeout_s

    def conduct(self, request: CallRequest) -> None:
        """Run the request to its end; no rank is RUNNING afterwards."""
        with reserved_port() as master_port:
            for progress in self.ranks:
                progress.process.send(self._call(request, progress.rank, master_port))
            self._collect_while(RankState.RUNNING)
            self._give_up_while(RankState.RUNNING)
            for progress in self.ranks:
                if progress.state is RankState.RETURNED:
                    progress.process.send(Release())
            self._deadline = time.monotonic() + LEAVE_S
            self._collect_while(RankState.RETURNED)
            self._give_up_while(RankState.RETURNED)

    def _call(self, request: CallRequest, rank: int, master_port: int) -> Call:
        return Call(
            rank=rank,
            world=len(self.ranks),
            payload=pickle.dumps((request.fn, tuple(request.args), dict(request.kwargs))),
            backend=request.backend,
            pg_timeout_s=request.pg_timeout_s,
            seed=request.seed,
            master_port=master_port,
            sys_path=list(sys.path),
            env=dict(request.env),
            allowed_leaks=frozenset(request.allowed_leaks),
            fresh=request.fresh,
        )

    def _collect_while(self, state: RankState) -> None:
        while pending := [p for p in self.ranks if p.state is state]:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return
            sources: dict[Any, RankProgress] = {p.process.connection: p for p in pending}
            sources |= {p.process.sentinel: p for p in pending}
            # A message and the end of its sender may arrive together: one look a rank, message first.
            ready = {sources[source].rank: sources[source] for source in wait(list(sources), remaining)}
            for progress in ready.values():
                self._advance(progress)

    def _advance(self, progress: RankProgress) -> None:
        match progress.process.receive():
            case StorePort(port):
                for other in self.ranks[1:]:
                    other.process.send(StoreAt(port))
            case Returned(payload):
                progress.state = RankState.RETURNED
                progress.seconds = time.monotonic() - self._started
                progress.value = pickle.loads(payload)
            case Clean(leaks):
                progress.state = RankState.LEFT
                progress.leaks = leaks
            case Raised(text):
                self._fail(progress, RankState.RAISED, text)
            case None:
                exitcode = progress.process.wait(5)
                self._fail(progress, RankState.DIED, f"its process ended with exit code {exitcode}")
            case message:
                raise AssertionError(f"rank {progress.rank} sent {message}, which nobody expects")

    def _give_up_while(self, state: RankState) -> None:
        overdue = [p for p in self.ranks if p.state is state]
        # All stacks first: killing one rank wakes the others from where they hung.
        for progress, stacks in [(p, p.process.stacks()) for p in overdue]:
            progress.process.kill()
            self._fail(progress, RankState.OVERRAN, f"its stacks at that moment:\n{stacks}")

    def _fail(self, progress: RankProgress, state: RankState, error_text: str) -> None:
        progress.state, progress.error_text = state, error_text
        progress.seconds = time.monotonic() - self._started
        self.failed.append(progress)
        if self._grace_s is not None:
            self._deadline = min(self._deadline, time.monotonic() + self._grace_s)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port, kept free for the time of the block: bound, never listening.

    With SO_REUSEADDR on both sides a store can still bind and listen there, while the kernel gives
    the port to nobody who asks for just any.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield int(reservation.getsockname()[1])
