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


def test_a_locale_that_lacks_a_character_loses_no_line_and_fails_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx_command", "run", "--nproc", "2", "script.py"]
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "PYTHONIOENCODING": "latin-1"}
    (tmp_path / "script.py").write_text("import os; os.write(1, 'caf\u00e9 1 \u20ac\\n'.encode())")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=50)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [b"%d \\u2502 caf\xe9 1 \\u20ac" % rank for rank in range(2)]


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
@pytest.mark.parametrize("arguments", [["nonsense"], ["runs"]])
def test_no_colours_on_a_terminal_that_wants_none(
    arguments: list[str], no_color: str, coloured: bool, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "20261119-101112-train").mkdir(parents=True)
    (tmp_path / "runs" / "20261119-101112-train" / "run.json").write_text('{"state": "failed"}')
    ours, terminal = os.openpty()
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "NO_COLOR": no_color, "TERM": "xterm"}
    command = [sys.executable, "-m", "phalanx_command", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environ, stdout=terminal, stderr=terminal, timeout=50)
    os.close(terminal)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    assert said and ("\x1b[" in said) is coloured, (done.returncode, said)
