"""Whole programs, started as users start them, that end in every way and fail in every way (`make soak`).

However a rank fails, every process of the program ends by itself, nothing is left behind, nobody aborts, and whoever looks
at the output finds the rank at fault, with its words if it had any. However a program ends, exit codes are right, nothing is
said but what must be, and nothing is left. A case that goes wrong prints its plan, with its seed: it is drawn again with
`PHALANX_SOAK_SEED=<seed> PHALANX_SOAK_PROGRAMS=1`.

| variable | default | |
| --- | --- | --- |
| PHALANX_SOAK_SEED | 0 | the first seed; one fault is drawn from each |
| PHALANX_SOAK_PROGRAMS | 500 | stop after as many faults |
| PHALANX_SOAK_ENDS | 100 | how often each kind of end is tried |
| PHALANX_SOAK_SECONDS | 1500 | or stop after so long, each of the two |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.process import SEARCH_PATH
from tests.soak.programs import ends, faults

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_BATCH = 56


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"PHALANX_SOAK_{name}", default))


def _conducted(kind: str, plans: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The outcome of each plan, until the time is over; in batches, so that a driver that hangs is noticed."""
    deadline = time.monotonic() + _setting("SECONDS", 1500)
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for start in range(0, len(plans), _BATCH):
        if time.monotonic() > deadline:
            return
        command = [sys.executable, "-m", "tests.soak.programs.driver", kind]
        text = json.dumps(plans[start : start + _BATCH])
        done = subprocess.run(command, input=text, env=environ, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stderr[-3000:]
        yield from map(json.loads, done.stdout.splitlines())


def _soaked(
    kind: str, plans: list[dict[str, Any]], named: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: Counter[str] = Counter()
    wrong, slowest = [], (0.0, "")
    for outcome in _conducted(kind, plans):
        name = named(outcome["plan"])
        seen[name] += 1
        slowest = max(slowest, (outcome["seconds"], name))
        if outcome["problem"]:
            wrong.append(f"{outcome['plan']}: {outcome['problem']}\n" + "\n".join(outcome["texts"])[-3000:])
        with capsys.disabled():
            print(f"\r{kind}: {seen.total()} of {len(plans)}, {len(wrong)} wrong", end="", flush=True)
    with capsys.disabled():
        table = ", ".join(f"{number} {what}" for what, number in sorted(seen.items()))
        print(f"\nslowest {slowest[0]:.0f} s ({slowest[1]}); {table}")
    assert not wrong, "\n\n".join(wrong)
    assert seen, "no case was run"


def test_whole_programs_end_by_themselves_and_name_who_failed(capsys: pytest.CaptureFixture[str]) -> None:
    first = _setting("SEED", 0)
    plans = [faults.draw(seed) for seed in range(first, first + _setting("PROGRAMS", 500))]
    _soaked("faults", plans, lambda plan: f"{plan['fault']} under {plan['launcher']}", capsys)


def test_programs_end_in_every_way_with_the_right_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    plans = ends.plans(range(_setting("ENDS", 100)))
    _soaked("ends", plans, lambda plan: f"{plan['way']} under {plan['launcher']}", capsys)
