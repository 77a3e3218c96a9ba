"""Elastic runs and faults drawn at random: program × optimizer × fault × moment × backend (`make soak`).

Each run is computed again from what its ranks wrote down. A case that goes wrong prints its seed; it is drawn again with
`PHALANX_SOAK_SEED=<seed> PHALANX_SOAK_ELASTIC=1`.

| variable | default | |
| --- | --- | --- |
| PHALANX_SOAK_SEED | 0 | the first seed; one case is drawn from each |
| PHALANX_SOAK_ELASTIC | 1000 | stop after as many |
| PHALANX_SOAK_SECONDS | 1500 | or after so long |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cluster.process import SEARCH_PATH
from tests.elastic.draw import draw

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_BATCH = 20


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"PHALANX_SOAK_{name}", default))


def test_elastic_runs_with_faults_at_any_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, left = _setting("SEED", 0), _setting("ELASTIC", 1000)
    deadline = time.monotonic() + _setting("SECONDS", 1500)
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    failed: dict[int, str] = {}
    recovered: list[float] = []
    num_fired = num_cases = 0
    while left > 0 and time.monotonic() < deadline:
        seeds = range(first, first + min(_BATCH, left))
        command = [sys.executable, "-m", "tests.elastic.cases", str(tmp_path / str(first))]
        text = json.dumps([asdict(draw(seed)) for seed in seeds])
        done = subprocess.run(command, input=text, env=environ, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"seeds {seeds}: {done.stderr[-3000:]}"
        for seed, line in zip(seeds, done.stdout.splitlines(), strict=True):
            outcome = json.loads(line)
            num_cases, num_fired = num_cases + 1, num_fired + len(outcome["fired"])
            recovered += outcome["recovered_s"]
            if outcome["error"]:
                failed[seed] = outcome["error"]
        first, left = first + len(seeds), left - len(seeds)
    recovered.sort()
    with capsys.disabled():
        print(f"\nelastic: {num_cases} cases, {num_fired} faults fired, {len(failed)} failed")
        if recovered:
            median, late = recovered[len(recovered) // 2], recovered[int(len(recovered) * 0.99)]
            print(f"from a fault to the next committed step: median {median:.3f} s, 99 % {late:.3f} s")
    assert not failed, failed
    assert num_fired, "no fault was drawn that fired"
