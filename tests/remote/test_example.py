"""The example that people run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_parameter_server_example_converges_and_prints_its_throughput() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "examples/parameter_server.py", "--steps", "200"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(trainer\d): loss (\S+) -> (\S+), (\d+) examples/s", done.stdout)
    assert sorted(name for name, *_ in found) == ["trainer0", "trainer1"], done.stdout
    for _, first, last, rate in found:
        assert float(last) < 0.5 * float(first) and int(rate) > 0
