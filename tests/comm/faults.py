"""Faults put into a collective at a chosen moment, and what every rank must make of them.

A plan names a collective, a fault, the rank that suffers it and the moment. The victim first runs the
collective unharmed and notes its moments (the steps of the team, and before, amid and after each),
so that the plan's moment exists and the fault fires. The victim leaves a note in a file when it
fires; every other rank must then finish correctly, or raise the right error in time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.group.process_group import PhalanxProcessGroup
from phalanx.comm.hierarchical import hosts
from phalanx.comm.hierarchical.operations import HierarchicalOperations
from phalanx.comm.shm.ops.operations import HostOperations
from phalanx.comm.shm.transport.team import Team
from phalanx.errors import CollectiveTimeout, CommunicationError, PeerFailure
from tests.comm.contract import Case, Rank, check

NOTICED_S = 1.0
LIMIT_S = 1.0  # the group's time limit where a rank stops for longer
SLACK_S = 5.0  # for a busy machine: other tests run at the same time. Far below LONG_S.
LONG_S = 30.0


class Fault(Enum):
    """What happens to the victim."""

    KILL = "kill"
    RAISE = "raise"
    STOP = "stop"  # until the others have given up on it
    PAUSE = "pause"  # stopped for a moment, then continued
    SLOW = "slow"
    ABORT = "abort"
    LEAVE = "leave"  # destroys its group


@dataclass(frozen=True)
class FaultPlan:
    """One fault. `moment` is taken modulo the moments that the collective has."""

    case: Case
    fault: Fault
    victim: int
    moment: int
    layout: str | None = None

    @property
    def is_harmless(self) -> bool:
        """Whether every rank must finish as if nothing had happened."""
        return self.fault in (Fault.PAUSE, Fault.SLOW)


Seen = dict[str, Any]


class InjectedError(Exception):
    """What a victim raises."""


def suffer_all(rank: int, world: int, plans: Sequence[FaultPlan], notes: str) -> list[Seen]:
    """One rank's part in several plans, each with a group of its own; what it saw of each.

    The default group, of gloo, suffers nothing: it brings the ranks together again. Only a plan that
    kills a rank must be the last one.
    """
    seen = []
    for number, plan in enumerate(plans):
        hosts._pretended = None if plan.layout is None else plan.layout[rank]
        try:
            group = dist.new_group(backend="phalanx", timeout=timedelta(seconds=LONG_S))
        finally:
            hosts._pretended = None
        assert isinstance(group, PhalanxProcessGroup)
        seen.append(suffer(rank, world, plan, Path(notes) / str(number), group))
        if plan.fault is not Fault.KILL:
            dist.barrier()
        dist.destroy_process_group(group)
    return seen


def suffer(rank: int, world: int, plan: FaultPlan, note: Path, group: PhalanxProcessGroup) -> Seen:
    """One rank's part in one plan; what it saw."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    me = Rank(rank, world, group)
    moments = _moments(plan.case, me, _team(group))
    # By gloo: a rank that is still in a barrier of the group itself would hear of what comes next.
    dist.barrier()
    group.set_timeout(timedelta(seconds=LIMIT_S if plan.fault is Fault.STOP else LONG_S))
    if rank == plan.victim:
        _arm(group, plan, moments, note)
    seen: Seen = {}
    try:
        check(plan.case, me)
        dist.barrier(group)
        seen["outcome"] = "finished"
    except InjectedError:
        seen["outcome"] = "injected"
    except CommunicationError as error:
        seen |= {"outcome": type(error).__name__, "ranks": error.ranks, "text": str(error)}
    fired_at = _read(note)
    seen["delay_s"] = time.monotonic() - fired_at if fired_at else None
    if plan.fault is Fault.STOP and rank != plan.victim:
        os.kill(int(pids[plan.victim]), signal.SIGCONT)
    if not plan.is_harmless:
        seen["afterwards"] = _still_broken(group)
    return seen


def _still_broken(group: PhalanxProcessGroup) -> str:
    """A broken group stays broken, at once and for every collective."""
    began = time.monotonic()
    try:
        dist.barrier(group)
    except (CommunicationError, ValueError, RuntimeError) as error:
        assert time.monotonic() - began < SLACK_S, "a broken group made its user wait"
        return type(error).__name__
    return "works"


def _team(group: PhalanxProcessGroup) -> Team:
    operations = group.lane.operations
    if isinstance(operations, HierarchicalOperations):
        return operations.local.team
    assert isinstance(operations, HostOperations)
    return operations.team


def _moments(case: Case, me: Rank, team: Team) -> list[tuple[str, int, str]]:
    """The moments of a collective, in order; also its first, unharmed run."""
    moments: list[tuple[str, int, str]] = []
    team.observer = lambda *moment: moments.append(moment)
    check(case, me)
    team.observer = None
    return moments


def _arm(
    group: PhalanxProcessGroup, plan: FaultPlan, moments: list[tuple[str, int, str]], note: Path
) -> None:
    """Let the fault happen at the plan's moment of the next collective."""
    countdown = plan.moment % len(moments)
    team = _team(group)

    def observe(collective: str, step: int, moment: str) -> None:
        nonlocal countdown
        if countdown == 0:
            team.observer = None
            note.with_suffix(".part").write_text(json.dumps([time.monotonic(), collective, step, moment]))
            note.with_suffix(".part").rename(note)
            _ACTIONS[plan.fault](group)
        countdown -= 1

    team.observer = observe


def _read(note: Path) -> float | None:
    return float(json.loads(note.read_text())[0]) if note.exists() else None


def _raise(_: PhalanxProcessGroup) -> None:
    raise InjectedError("injected")


def _pause(_: PhalanxProcessGroup) -> None:
    # Somebody else has to continue what is stopped; again and again, as it may come too early.
    command = f"while sleep 0.2 && kill -CONT {os.getpid()}; do :; done"
    with subprocess.Popen(["sh", "-c", command]) as waker:
        # To this thread, which so stops before it goes on. A signal to the process is taken by any thread: this
        # one, which need not be the main one, could have ended the waker before the process stood still.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        waker.kill()


def _leave(group: PhalanxProcessGroup) -> None:
    # As another thread would, which has to wait until the collective under way has given up.
    threading.Thread(target=group.shutdown).start()
    watch = _team(group).watch
    while watch.broken is None:
        time.sleep(0.001)


_ACTIONS: dict[Fault, Callable[[PhalanxProcessGroup], None]] = {
    Fault.KILL: lambda _: os.kill(os.getpid(), signal.SIGKILL),
    Fault.RAISE: _raise,
    Fault.STOP: lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    Fault.PAUSE: _pause,
    Fault.SLOW: lambda _: time.sleep(0.05),
    Fault.ABORT: lambda group: group.abort(),
    Fault.LEAVE: _leave,
}


def verify(plan: FaultPlan, rank: int, seen: Seen) -> None:
    """Raise unless what a surviving rank saw is what it must see.

    A rank may finish a collective in which another has failed, if it has all it needs; the next one
    then raises.
    """
    outcome, named = seen["outcome"], seen.get("ranks", ())
    context = f"rank {rank}, {plan}: {seen}"
    if plan.is_harmless:
        assert outcome == "finished", context
        return
    assert seen["afterwards"] in ("CommunicationError", "PeerFailure", "CollectiveTimeout"), context
    if rank == plan.victim:
        # One that stopped may find, when it goes on, that everybody had arrived before giving up on it.
        expected = {Fault.RAISE: ("injected",), Fault.STOP: ("CollectiveTimeout", "finished")}
        elsewhere = ("PeerFailure", "CollectiveTimeout") if plan.layout else ()
        assert outcome in (*expected.get(plan.fault, ("CommunicationError",)), *elsewhere), context
        return
    if plan.fault is Fault.STOP and outcome == "finished":
        return  # the first to give up let the victim go on, which still reached this rank in time
    if plan.fault is Fault.STOP:
        assert outcome == CollectiveTimeout.__name__ or (plan.layout and outcome == PeerFailure.__name__), context
        limit_s = LIMIT_S if plan.layout is None else 1.25 * LIMIT_S + 1.0
        assert seen["delay_s"] < limit_s + NOTICED_S + SLACK_S, context
    else:
        assert outcome == PeerFailure.__name__, context
        assert seen["delay_s"] < NOTICED_S + SLACK_S, context
    if plan.layout is None or plan.fault is not Fault.STOP:
        assert tuple(named) == (plan.victim,), context
    else:  # between hosts nobody knows which of the silent ones keeps the others waiting
        assert plan.victim in named, context
