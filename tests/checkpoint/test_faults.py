"""Writers stopped after any operation: what is loaded then is exactly the old or exactly the new state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.checkpoint.faults import NEW, NOTHING, OLD, Case, Fault, Schedule, cases, judge, num_operations, run

# Of all cases, one in so many runs with the ordinary tests. A prime, so that every operation, rank and fault has its turn.
_EVERY = 13


def _check(chosen: list[Case], folder: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for case in chosen:
        outcome = run(case, folder)
        wrong = judge(case, outcome)
        assert wrong is None, f"{wrong}: {case}"
        seen[outcome.loaded] += 1
    return seen


def test_a_sample_of_all_operations(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    chosen = list(cases(folder))
    assert len(chosen) > 3000
    # A power cut shows what syncs are for, at a few places only: all of those for two ranks.
    cut = [case for case in chosen if case.fault is Fault.POWER and case.world == 2]
    seen = _check([*chosen[::_EVERY], *cut], folder)
    # All three happen: a fault early, a fault late, a fault in the first save.
    assert min(seen[NEW], seen[OLD], seen[NOTHING]) > 10


def test_every_operation_of_two_ranks_that_run_in_step(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    counts = num_operations(2, Schedule.IN_STEP, folder)
    chosen = [
        Case(2, True, Fault.KILL, victim, operation, Schedule.IN_STEP)
        for victim, count in enumerate(counts)
        for operation in range(count)
    ]
    seen = _check(chosen, folder)
    assert seen[NEW] and seen[OLD]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_operations(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    seen = _check(list(cases(folder)), folder)
    print(dict(seen))
    assert sum(seen.values()) > 3000
