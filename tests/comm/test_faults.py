"""A rank that dies, stops, raises, dawdles or leaves in the middle of a collective.

A short selection; `make soak` draws thousands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import run_ranks, spawn_ranks
from tests.comm.contract import LARGE, Case
from tests.comm.faults import Fault, FaultPlan, suffer_all, verify

pytestmark = pytest.mark.timeout(90)

CASES = {
    "all_reduce, inline": Case("all_reduce"),
    "all_reduce, in place": Case("all_reduce", numel=LARGE, segment="all"),
    "all_reduce, staged": Case("all_reduce", numel=2 * LARGE, is_async=True),
    "reduce, staged": Case("reduce", numel=LARGE),
    "broadcast, in place": Case("broadcast", numel=LARGE, segment="all"),
    "all_gather, staged": Case("all_gather_single", numel=LARGE),
    "reduce_scatter, in place": Case("reduce_scatter_single", numel=LARGE, segment="all"),
    "all_to_all": Case("all_to_all_single", numel=LARGE),
    "barrier": Case("barrier"),
}


def _plans(fault: Fault, victim: int, layout: str | None = None) -> list[FaultPlan]:
    """A plan for each case, at a moment that differs from case to case and fault to fault."""
    draw = random.Random(f"{fault}{victim}{layout}")
    return [FaultPlan(case, fault, victim, draw.randrange(100), layout) for case in CASES.values()]


def run_plans(plans: Sequence[FaultPlan], world: int, notes: Path) -> None:
    """Run plans that kill nobody, and check that each fired and what came of it."""
    seen = run_ranks(world, suffer_all, plans, str(notes), timeout_s=80)
    for number, plan in enumerate(plans):
        assert (notes / str(number)).exists(), f"the fault did not fire: {plan}"
        for rank in range(world):
            verify(plan, rank, seen[rank][number])


def run_killing_plan(plan: FaultPlan, world: int, notes: Path) -> None:
    """Run a plan that kills a rank, and check that it did and what came of it."""
    outcomes = spawn_ranks(world, suffer_all, [plan], str(notes), timeout_s=40)
    assert (notes / "0").exists(), f"the fault did not fire: {outcomes}"
    assert outcomes[plan.victim].exitcode == -9, outcomes
    for outcome in outcomes:
        if outcome.rank != plan.victim:
            assert outcome.exitcode == 0 and not outcome.timed_out, outcome
            verify(plan, outcome.rank, outcome.value[0])


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.ABORT, Fault.LEAVE])
def test_a_rank_that_fails_is_named_by_all_others_within_a_second(fault: Fault, tmp_path: Path) -> None:
    run_plans(_plans(fault, victim=1), 3, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_dies_is_named_by_all_others_within_a_second(name: str, tmp_path: Path) -> None:
    moment = random.Random(name).randrange(100)
    run_killing_plan(FaultPlan(CASES[name], Fault.KILL, 1, moment), 3, tmp_path)


def test_a_rank_that_stops_is_named_at_the_time_limit(tmp_path: Path) -> None:
    run_plans(_plans(Fault.STOP, victim=2)[:4], 3, tmp_path)


@pytest.mark.parametrize("fault", [Fault.PAUSE, Fault.SLOW])
def test_a_rank_that_is_slow_changes_nothing(fault: Fault, tmp_path: Path) -> None:
    run_plans(_plans(fault, victim=0), 3, tmp_path)


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_rank_that_fails_is_named_on_every_host(victim: int, tmp_path: Path) -> None:
    run_plans(_plans(Fault.RAISE, victim, "abab"), 4, tmp_path)


@pytest.mark.parametrize("victim", [0, *(pytest.param(rank, marks=pytest.mark.thorough) for rank in (1, 2)), 3])
def test_a_rank_that_dies_is_named_on_every_host(victim: int, tmp_path: Path) -> None:
    case = CASES["all_reduce, staged"]
    run_killing_plan(FaultPlan(case, Fault.KILL, victim, 5 * victim, "abab"), 4, tmp_path)


def test_a_rank_that_dies_alone_on_its_host_is_named_and_no_other(tmp_path: Path) -> None:
    case = CASES["all_reduce, staged"]
    run_killing_plan(FaultPlan(case, Fault.KILL, 1, 5, "abc"), 3, tmp_path)
