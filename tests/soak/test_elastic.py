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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.process import SEARCH_PATH
from tests.elastic.draw import draw

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_AT_ONCE = 2


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"PHALANX_SOAK_{name}", default))


def _start(seeds: range, folder: Path) -> subprocess.Popen[str]:
    """One process that imports torch once, and forks the workers of all these cases."""
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    environ["PHALANX_CASES_SECONDS"] = str(_setting("SECONDS", 1500))
    folder.mkdir()
    (folder / "cases").write_text(json.dumps([asdict(draw(seed)) for seed in seeds]))
    command = [sys.executable, "-m", "tests.elastic.cases", str(folder / "runs")]
    with open(folder / "cases") as cases, open(folder / "outcomes", "w") as out, open(folder / "errors", "w") as errors:
        return subprocess.Popen(command, stdin=cases, stdout=out, stderr=errors, text=True, env=environ)


def test_elastic_runs_with_faults_at_any_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, count = _setting("SEED", 0), _setting("ELASTIC", 1000)
    all_seeds = [range(first + lane, first + count, _AT_ONCE) for lane in range(min(_AT_ONCE, count))]
    processes = [_start(seeds, tmp_path / str(lane)) for lane, seeds in enumerate(all_seeds)]
    try:
        for process in processes:
            process.wait(_setting("SECONDS", 1500) + 120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outcomes: dict[int, dict[str, Any]] = {}
    for lane, seeds in enumerate(all_seeds):
        found = map(json.loads, (tmp_path / str(lane) / "outcomes").read_text().splitlines())
        outcomes |= {seeds[outcome["number"]]: outcome for outcome in found}
        assert processes[lane].returncode == 0, (tmp_path / str(lane) / "errors").read_text()[-3000:]
    with capsys.disabled():
        print(f"\nelastic: {summary(outcomes)}")
    failed = {seed: outcome["error"] for seed, outcome in outcomes.items() if outcome["error"]}
    assert not failed, failed
    assert any(outcome["fired"] for outcome in outcomes.values()), "no fault was drawn that fired"


def summary(outcomes: dict[int, dict[str, Any]]) -> str:
    """The figures of many cases in words."""
    fired = sum(len(outcome["fired"]) for outcome in outcomes.values())
    failed = sum(bool(outcome["error"]) for outcome in outcomes.values())
    stuck = [seed for seed, outcome in outcomes.items() if outcome["stuck"]]
    times = sorted(seconds for outcome in outcomes.values() for seconds in outcome["recovered_s"])
    text = f"{len(outcomes)} cases, {fired} faults fired, {failed} failed, {len(stuck)} stood still for seconds {stuck}"
    if not times:
        return text
    median, late = times[len(times) // 2], times[int(len(times) * 0.99)]
    return f"{text}; fault to next committed step: median {median:.3f} s, 99 % {late:.3f} s, worst {times[-1]:.3f} s"
