"""A program forked from the warm process behaves as one in a fresh interpreter, to who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.command import Command, run_command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(60)

# Says how it was started, then does as it is told.
PROGRAM = """
import os, sys
print(sys.argv[1:], sys.stdin.read(), os.environ["COLOUR"], os.getcwd(), __name__, "torch" in sys.modules)
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("cold", [False, True])
def test_arguments_streams_folder_environment_and_exit_code(tmp_path: Path, cold: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for command in (["-c", PROGRAM], ["program.py"], ["-m", "program"]):
        process = Command(
            [sys.executable, *command, "3", "x"],
            cold,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "COLOUR": "red"},
        )
        out, errors = process.communicate("words", timeout=30)
        # With torch there already, which a program that imports nothing has not.
        assert (out, errors) == (f"['3', 'x'] words red {tmp_path} __main__ {not cold}\n", "to stderr\n")
        assert process.returncode == 3


def test_signals_reach_it_and_are_told() -> None:
    process = Command([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    process.stdout.close()


def test_what_needs_another_interpreter_gets_one(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("NUMBER = 7\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SEARCH_PATH])}
    done = run_command(
        [sys.executable, "-c", "import only_here, sys; print(only_here.NUMBER, 'torch' in sys.modules)"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "7 False\n", "its own path, and nothing imported before it"
    with pytest.raises(subprocess.CalledProcessError):
        run_command([sys.executable, "-c", "raise SystemExit(2)"], check=True, timeout=30)
