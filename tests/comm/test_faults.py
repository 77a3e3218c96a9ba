"""A rank that dies, stops, raises, dawdles or leaves in the middle of a collective.

A short selection; `make soak` draws thousands.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster import spawn_ranks
from tests.comm.contract import LARGE, Case
from tests.comm.faults import Fault, FaultPlan, suffer, verify

pytestmark = pytest.mark.timeout(60)

CASES = {
    "all_reduce, slot": Case("all_reduce"),
    "all_reduce, in place": Case("all_reduce", numel=LARGE, segment="all"),
    "all_reduce, staged": Case("all_reduce", numel=2 * LARGE, is_async=True),
    "reduce, staged": Case("reduce", numel=LARGE),
    "broadcast, in place": Case("broadcast", numel=LARGE, segment="all"),
    "all_gather, staged": Case("all_gather_single", numel=LARGE),
    "reduce_scatter, in place": Case("reduce_scatter_single", numel=LARGE, segment="all"),
    "all_to_all": Case("all_to_all_single", numel=LARGE),
    "barrier": Case("barrier"),
}


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.RAISE, Fault.ABORT, Fault.LEAVE])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_fails_is_named_by_all_others_within_a_second(
    fault: Fault, name: str, tmp_path: Path
) -> None:
    run_plan(FaultPlan(CASES[name], fault, victim=1, moment=_moment(name, fault)), 3, tmp_path)


@pytest.mark.parametrize("name", ["all_reduce, slot", "all_reduce, in place", "all_gather, staged"])
def test_a_rank_that_stops_is_named_at_the_time_limit(name: str, tmp_path: Path) -> None:
    run_plan(FaultPlan(CASES[name], Fault.STOP, victim=2, moment=_moment(name, Fault.STOP)), 3, tmp_path)


@pytest.mark.parametrize("fault", [Fault.PAUSE, Fault.SLOW])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_is_slow_changes_nothing(fault: Fault, name: str, tmp_path: Path) -> None:
    run_plan(FaultPlan(CASES[name], fault, victim=0, moment=_moment(name, fault)), 3, tmp_path)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", [Fault.KILL, Fault.RAISE])
def test_a_failure_is_heard_of_on_every_host(victim: int, fault: Fault, tmp_path: Path) -> None:
    case = Case("all_reduce", numel=LARGE)
    run_plan(FaultPlan(case, fault, victim, moment=victim, layout="abab"), 4, tmp_path)


def _moment(name: str, fault: Fault) -> int:
    return random.Random(f"{name}{fault}").randrange(100)


def run_plan(plan: FaultPlan, world: int, tmp_path: Path) -> None:
    """Run a plan on fresh processes, and check that it fired and what came of it."""
    note = tmp_path / "fired"
    outcomes = spawn_ranks(world, suffer, plan, str(note), backend=None, timeout_s=40)
    assert note.exists(), f"the fault did not fire: {outcomes}"
    for outcome in outcomes:
        if plan.fault is Fault.KILL and outcome.rank == plan.victim:
            assert outcome.exitcode == -9, outcome
        else:
            assert outcome.exitcode == 0 and not outcome.timed_out, outcome
            verify(plan, outcome.rank, outcome.value)
