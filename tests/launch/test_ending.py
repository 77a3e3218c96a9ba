"""However a run ends, nothing it started lives on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import PATIENCE
from tests.cluster.command import Command

pytestmark = pytest.mark.timeout(60)

FOREVER = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print("alive", os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.1)
"""


def alive(pid: int) -> bool:
    """Whether the process still runs; one that waits to be reaped by a lazy init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Forever:
    """`phalanx run` of a script that never ends, once every worker has said so."""

    def __init__(self, folder: Path, *arguments: str, cold: bool = False) -> None:
        (folder / "forever.py").write_text(FOREVER)
        command = [
            sys.executable,
            "-m",
            "phalanx.cli.main",
            "run",
            "--nproc",
            "2",
            "--grace",
            "1",
            "--run-dir",
        ]
        command += [str(folder / "runs"), str(folder / "forever.py"), *arguments]
        self.process = Command(command, cold, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.workers, self.children = [], []
        for line in lines:
            found = re.search(r"alive (\d+) (\d+)", line)
            assert found is not None, line
            self.workers.append(int(found[1]))
            self.children.append(int(found[2]))

    def end(self, number: signal.Signals) -> tuple[float, str]:
        started = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30 * PATIENCE)
        return time.monotonic() - started, errors


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mood", ["polite", "deaf"])
def test_a_signal_ends_workers_and_their_children(tmp_path: Path, number: signal.Signals, mood: str) -> None:
    cold = number is signal.SIGINT and mood == "deaf"
    run = Forever(tmp_path, mood, cold=cold)
    libraries = Path(f"/proc/{run.process.pid}/maps").read_text()
    assert ("libtorch" in libraries) is not cold, "a launcher imports no torch (a warm one came with it)"
    seconds, errors = run.end(number)
    assert run.process.returncode == 128 + number
    wait_until_gone(run.workers + run.children, 5)
    assert f"ended by {number.name}" in errors and "Traceback" not in errors
    assert seconds < 20


LEFT_BEHIND = """
import os, signal, subprocess, sys, time
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], preexec_fn=deaf)
with open(f"child-{os.environ['RANK']}", "w") as file:
    file.write(str(child.pid))
if os.environ["RANK"] == "0":
    while not os.path.exists("child-1"):
        time.sleep(0.01)
    {end}
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["raise ValueError('first')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_worker_that_fails_leaves_nothing_that_it_started(tmp_path: Path, end: str) -> None:
    """Nor does one that is told to end then, and whose child does not listen."""
    (tmp_path / "train.py").write_text(LEFT_BEHIND.replace("{end}", end))
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", "2", "--grace", "1", "train.py"]
    run = Command(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.communicate(timeout=30 * PATIENCE)
    assert run.returncode == 1
    wait_until_gone([int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)], 5)


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    run = Forever(tmp_path)
    run.end(signal.SIGKILL)
    wait_until_gone(run.workers, 5)
    for child in run.children:
        os.kill(child, signal.SIGKILL)


# In the place of a thread of gloo's that nobody can wake: one of its name, which does not wait as those at rest do.
WITH_A_THREAD_OF_GLOO = """
import os, sys, threading, time
import phalanx

def work():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("pt_gloo_runloop")
    named.set()
    time.sleep(600)

def leave(code, exit=os._exit):
    print("left with", code, flush=True)
    exit(code)

named = threading.Event()
threading.Thread(target=work, daemon=True).start()
named.wait()
os._exit = leave
if sys.argv[1] == "raise":
    raise ValueError("on purpose")
if sys.argv[1] != "end":
    sys.exit(int(sys.argv[1]))
"""


def test_a_worker_with_a_collective_that_goes_on_ends_with_its_own_code(tmp_path: Path) -> None:
    """Taken down while gloo is at work, the interpreter would abort."""
    (script := tmp_path / "train.py").write_text(WITH_A_THREAD_OF_GLOO)
    wanted = {"end": 0, "7": 7, "raise": 1}
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", "1", "--run-dir"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = {how: Command([*command, str(tmp_path / how), str(script), how], **pipes) for how in wanted}
    for how, run in runs.items():
        said = run.communicate(timeout=PATIENCE * 30)[0]
        assert f"left with {wanted[how]}" in said, said
