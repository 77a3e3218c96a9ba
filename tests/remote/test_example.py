"""The example that people run."""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.multiprocessing as mp

from tests.cluster import spawn_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parameter_server.py"


def run_as_script(rank: int, world: int, output: str) -> None:
    """The whole script, with processes that are forked where it asks for new ones: those would import torch five times."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    forked = functools.partial(mp.start_processes, start_method="fork")
    with mock.patch.object(mp, "spawn", forked), mock.patch.object(sys, "argv", [str(EXAMPLE), "--steps", "150"]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.thorough
def test_the_parameter_server_example_converges_and_prints_its_throughput(tmp_path: Path) -> None:
    output = tmp_path / "said"
    (outcome,) = spawn_ranks(1, run_as_script, str(output), backend=None, timeout_s=90)
    assert outcome.exitcode == 0, outcome.error_text
    found = re.findall(r"(trainer\d): loss (\S+) -> (\S+), (\d+) examples/s", output.read_text())
    assert sorted(name for name, *_ in found) == ["trainer0", "trainer1"], output.read_text()
    for _, first, last, rate in found:
        assert float(last) < 0.5 * float(first) and int(rate) > 0
