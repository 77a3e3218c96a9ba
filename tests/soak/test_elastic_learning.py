"""Twenty deaths and joins, and the loss lands where that of the uninterrupted run does (`make soak`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.process import SEARCH_PATH
from tests.elastic.learning import STEPS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

NUM_DEATHS = 20


def _learn(folder: Path, *settings: dict[str, Any]) -> list[dict[str, Any]]:
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.elastic.learning", str(folder)]
    done = subprocess.run(command, input=json.dumps(settings), env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "zero"])
def test_a_run_through_twenty_deaths_learns_what_the_uninterrupted_run_learns(
    tmp_path: Path, sharded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, kept, shrunk = _learn(
        tmp_path,
        {"num_deaths": 0, "sharded": sharded},
        {"num_deaths": NUM_DEATHS, "seed": 1, "sharded": sharded},
        {"num_deaths": NUM_DEATHS, "seed": 2, "sharded": sharded, "keeps_batch": False},
    )
    for one in (kept, shrunk):
        assert one["lost"] == NUM_DEATHS and one["came"] >= NUM_DEATHS - 2, one["lost"]
    farthest = max(abs(a - b) for a, b in zip(whole["params"], kept["params"], strict=True))
    with capsys.disabled():
        losses = [f"{one['loss']:.5f}" for one in (whole, kept, shrunk)]
        print(f"\nheld-out loss {losses[0]} uninterrupted, {losses[1]} with the batch kept, {losses[2]} without;")
        print(f"parameters at most {farthest:.1e} apart with it; {shrunk['steps']} steps without, {STEPS} with it")
    # The same samples in the same steps: only the order of sums differs between two and three ranks.
    assert kept["steps"] == whole["steps"] == STEPS
    assert farthest < 1e-3 and abs(kept["loss"] - whole["loss"]) < 1e-4
    # Smaller batches while a rank was away: more steps, of the same samples.
    assert shrunk["steps"] > STEPS and abs(shrunk["loss"] - whole["loss"]) < 0.05 * whole["loss"]
