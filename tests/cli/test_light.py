"""Help, completion and typing mistakes answer without importing torch, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.cli.main import _COMMANDS
from tests.cluster.process import SEARCH_PATH

# What the command's entry point does, then: was torch imported?
PROGRAM = """
import sys, phalanx_command
try:
    phalanx_command.main()
except SystemExit as ended:
    print("ended", ended.code, "torch" in sys.modules, "rich" in sys.modules, file=sys.stderr)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, **variables}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)


def test_bare_phalanx_shows_its_help() -> None:
    done = run()
    assert done.stdout.startswith("Usage: phalanx") and "Start a training script" in done.stdout
    assert done.stderr == "ended 0 False False\n"


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_of_a_command_needs_no_torch(name: str) -> None:
    done = run(name, "--help")
    assert f"Usage: phalanx {name}" in done.stdout and done.stderr.startswith("ended 0 False"), done.stderr


def test_a_mistake_needs_no_torch() -> None:
    done = run("run", "--nporc", "2", "x.py")
    assert "did you mean --nproc?" in done.stderr and done.stderr.endswith("ended 2 False False\n")


def test_options_are_completed_without_torch() -> None:
    done = run(COMP_WORDS="phalanx run --nn", COMP_CWORD="2", _PHALANX_COMPLETE="bash_complete")
    assert "plain,--nnodes" in done.stdout.splitlines() and "False" in done.stderr


def test_the_package_runs_as_a_module() -> None:
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "--version"], env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.startswith("phalanx, version ")
