"""Faults drawn at random, thousands of them: `make soak`.

Every fault is checked to have fired, every rank to have made of it what it must (tests/comm/faults.py), and every process
to have left nothing behind (tests/cluster). A case that goes wrong names its seed, and is drawn again with
`PHALANX_SOAK_SEED=<seed> PHALANX_SOAK_CASES=1`.

| variable | default | |
| --- | --- | --- |
| PHALANX_SOAK_SEED | 0 | the first seed; one round of cases is drawn from each |
| PHALANX_SOAK_CASES | 3000 | stop after as many |
| PHALANX_SOAK_SECONDS | 1500 | or after so long |
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.comm.faults import Fault
from tests.comm.test_faults import run_killing_plan, run_plans
from tests.soak.draw import draw_batch, draw_plan

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

_BATCH = 16
_KILLS = 2
_WORLDS = (2, 3, 4, 5)


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"PHALANX_SOAK_{name}", default))


def test_faults_at_any_moment_of_any_collective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, num_cases = _setting("SEED", 0), _setting("CASES", 3000)
    deadline = time.monotonic() + _setting("SECONDS", 1500)
    fired: Counter[str] = Counter()
    while fired.total() < num_cases and time.monotonic() < deadline:
        try:
            fired += _round(seed, tmp_path / str(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, after {fired.total()} faults: {error}") from error
        with capsys.disabled():
            print(f"\rsoak: {fired.total()} faults fired, seed {seed}", end="", flush=True)
        seed += 1
    with capsys.disabled():
        print("\n" + ", ".join(f"{count} {what}" for what, count in sorted(fired.items())))
    if num_cases >= 500 and time.monotonic() < deadline:
        assert len(fired) == 2 * len(Fault), f"some fault was never drawn on one host or on several: {fired}"


def _round(seed: int, folder: Path) -> Counter[str]:
    """One batch of faults that kill nobody, in the same processes, and some that do; how many of each fired."""
    chance = random.Random(seed)
    world = chance.choice(_WORLDS)
    batch = draw_batch(chance, world, _BATCH)
    killing = [draw_plan(chance, Fault.KILL, world) for _ in range(_KILLS)]
    folder.mkdir()
    run_plans(batch, world, folder)
    for number, plan in enumerate(killing):
        (folder / f"kill-{number}").mkdir()
        run_killing_plan(plan, world, folder / f"kill-{number}")
    where = {True: "one host", False: "several"}
    return Counter(f"{plan.fault.value} on {where[plan.layout is None]}" for plan in (*batch, *killing))
