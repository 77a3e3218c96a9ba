"""A process ends with the exit code that it should have, says who failed and why, and never aborts."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from typing import Any

import pytest

from tests.cluster.command import run_command
from tests.comm.failure.ends import LIMIT_S, Plan

SOON_S = 45  # on a busy machine; the ranks' time limit is longer


def ended(plans: list[Plan]) -> list[dict[str, Any]]:
    """What became of the plans, in one process that imports torch once for all."""
    command = [sys.executable, "-m", "tests.comm.failure.ends", *(json.dumps(asdict(plan)) for plan in plans)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_command(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S * len(plans))
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(plans), done.stderr
    return outcomes


def verify(plan: Plan, outcome: dict[str, Any]) -> None:
    """Every rank ended as it must, in time, and said what it must."""
    context = json.dumps(outcome, indent=1)
    victim_code = {"clean": 0, "kill": -9}.get(plan.kind, 1)
    survivor_code = {"clean": 0, "exit": 3}.get(plan.kind, 1)
    assert outcome["seconds"] < SOON_S, context
    for rank, (code, said) in enumerate(zip(outcome["codes"], outcome["stderr"], strict=True)):
        assert code == (victim_code if rank == plan.victim else survivor_code), context
        assert "terminate called" not in said and "Fatal Python error" not in said, context
        if plan.kind == "clean":
            assert said == "", context
        elif rank != plan.victim and plan.kind != "exit":
            assert f"rank {plan.victim}" in said and "PeerFailure" in said, context
            assert plan.kind == "kill" or "the victim's own words" in said, context
            # Ours are folded, except where multiprocessing writes the traceback.
            assert plan.starter == "process" or not re.search(r'File "[^"]*/(torch|phalanx)/', said), context


KINDS = ["clean", "raise", "hook", "backward", "kill", "exit"]


def some_of_each(backend: str, world: int = 3) -> list[Plan]:
    last = world - 1
    plans = [Plan(kind, backend, last, world) for kind in KINDS]
    # The rank that serves the store takes it along; and children of multiprocessing never reach `sys.excepthook`.
    plans += [Plan("raise", backend, 0, world), Plan("kill", backend, 0, world)]
    plans += [Plan("raise", backend, last, world, starter="process")]
    # Raises below the hooks of parameters, whose traceback the interpreter keeps to its end.
    return [*plans, Plan("kill", backend, last, world, overlapped=True)]


# A rank takes half a second to end. Two show what most endings are; that several survivors name the victim, two of them.
EVERYDAY = {
    "gloo": [
        *(Plan(kind, "gloo", victim=1, world=2) for kind in ("clean", "backward")),
        Plan("kill", "gloo", victim=0, world=2),
        Plan("raise", "gloo", victim=1, world=2, starter="process"),
        Plan("raise", "gloo"),
        Plan("hook", "gloo", victim=0, world=2),
    ],
    "phalanx": [
        *(Plan(kind, "phalanx", victim=1, world=2) for kind in ("clean", "raise")),
        Plan("kill", "phalanx", victim=1, world=2, overlapped=True),
        Plan("kill", "phalanx", victim=0),
    ],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", EVERYDAY)
def test_ranks_end_with_their_own_code_and_the_victims_words(backend: str) -> None:
    for plan, outcome in zip(EVERYDAY[backend], ended(EVERYDAY[backend]), strict=True):
        verify(plan, outcome)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_three_ranks_end_with_their_own_code_and_the_victims_words(backend: str) -> None:
    plans = some_of_each(backend)
    for plan, outcome in zip(plans, ended(plans), strict=True):
        verify(plan, outcome)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_ends_of_each_kind(kind: str, backend: str) -> None:
    plans = [Plan(kind, backend, victim=number % 3) for number in range(100)]
    for start in range(0, len(plans), 10):
        batch = plans[start : start + 10]
        for plan, outcome in zip(batch, ended(batch), strict=True):
            verify(plan, outcome)
