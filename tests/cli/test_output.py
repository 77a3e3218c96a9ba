"""Nobody looks: a run goes on when what it prints cannot be written, and its exit code is that of the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import sys, time
for number in range(20):
    print("line", number, flush=True)
    print("wrong", number, file=sys.stderr, flush=True)
    time.sleep(0.02)
open("done", "w").close()
sys.exit(int(sys.argv[1]))
"""
# What the shell makes of the streams of "$@".
WAYS = {
    "a pipe that nobody reads": 'set -o pipefail; "$@" | true',
    "a full disk": '"$@" > /dev/full',
    "no stdout": '"$@" >&-',
    "no stderr": '"$@" 2>&-',
    "no streams": '"$@" <&- >&- 2>&-',
    "full disks": '"$@" > /dev/full 2> /dev/full',
}


CASES = [("no streams", 3)]
MORE = [
    pytest.param(way, code, marks=pytest.mark.thorough) for way in WAYS for code in (0, 3) if (way, code) not in CASES
]


@pytest.mark.parametrize(("way", "code"), [*CASES, *MORE])
def test_a_run_goes_on_when_its_output_cannot_be_written(way: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # One: each starts plainly and imports torch, for two seconds.
    command = [sys.executable, "-m", "phalanx_command", "run", "--nproc", "1", "--grace", "5", "script.py", str(code)]
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "PHALANX_WARM": "0"}
    done = subprocess.run(
        ["bash", "-c", WAYS[way], "bash", *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50
    )
    assert (tmp_path / "done").exists(), done
    assert done.returncode == (1 if code else 0), done
    assert "Traceback" not in done.stderr, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    logs = [path.read_text() for path in run.rglob("stdout*")]
    assert logs and all(text.splitlines() == [f"line {number}" for number in range(20)] for text in logs)
    if way in ("a pipe that nobody reads", "a full disk"):
        assert done.stderr.count("stdout cannot be written to any more") == 1, done.stderr


LATIN = {"PYTHONIOENCODING": "latin-1"}


def test_a_run_goes_on_where_its_output_has_not_all_characters(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.stdout.buffer.write('Größe \u2714\\n'.encode())\n")
    command = [sys.executable, "-m", "phalanx_command", "run", "--nproc", "2", "--grace", "5", "script.py"]
    environ = {**os.environ, **LATIN, "PYTHONPATH": SEARCH_PATH, "PHALANX_WARM": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    assert sorted(done.stdout.decode("latin-1").splitlines()) == ["0 ? Größe ?", "1 ? Größe ?"]


def test_a_table_is_drawn_where_output_has_not_all_characters() -> None:
    command = [sys.executable, "-m", "phalanx_command", "doctor", "--no-self-test"]
    environ = {**os.environ, **LATIN, "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=50)
    assert b"Traceback" not in done.stderr and b"Python" in done.stdout, done.stderr.decode("latin-1")
