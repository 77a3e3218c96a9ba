"""An interrupt at an awkward moment ends everything, quietly, and what lasts is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.process import SEARCH_PATH
from tests.security.intruder import SECRET, Running

pytestmark = pytest.mark.timeout(120)

SLOW_IMPORT = """
import time
print("in an import", flush=True)
time.sleep(60)  # an import that lasts
"""


def descendants_of(pid: int) -> list[psutil.Process]:
    """Every process whose launcher that was, also when it has become somebody else's child."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PHALANX_AGENT_PID") == str(pid):
                found.append(process)
        except psutil.Error:
            continue
    return found


def below(pid: int) -> list[psutil.Process]:
    """The launcher's starter and workers, now: those that are forked show no variables of their own in /proc."""
    return [*psutil.Process(pid).children(recursive=True), *descendants_of(pid)]


def runs(process: psutil.Process) -> bool:
    """One that waits to be reaped by whoever it was left to does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pid: int, seen: list[psutil.Process], seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while (left := [one for one in seen if runs(one)] + descendants_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


@pytest.mark.parametrize(
    ("number", "moment_s", "warm"),
    [
        (signal.SIGINT, 0.1, "0"),  # each worker imports torch
        (signal.SIGINT, 0.8, "1"),  # the starter imports torch
        (signal.SIGINT, None, "1"),  # the script runs
        (signal.SIGTERM, 0.1, "1"),
        (signal.SIGHUP, 0.8, "0"),
    ],
)
def test_a_signal_while_workers_import_ends_them_without_a_traceback(
    tmp_path: Path, number: signal.Signals, moment_s: float | None, warm: str
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests themselves were started with nohup")
    cold = moment_s is not None
    with Running(tmp_path, SLOW_IMPORT, "--nproc", "2", cold=cold, PHALANX_WARM=warm) as run:
        run.wait_for("2 workers" if cold else r"1 │ in an import")
        time.sleep(moment_s or 0.0)
        seen = below(run.process.pid)
        run.process.send_signal(number)
        assert run.end(30) == 128 + number, run.said()
        assert gone(run.process.pid, seen)
    said = run.said()
    assert f"ended by {number.name}" in said and "Traceback" not in said and "Error" not in said, said
    assert seen or moment_s == 0.1, "there were processes to end"


def test_an_interrupt_while_the_command_itself_imports_ends_it_without_a_word(tmp_path: Path) -> None:
    # An import that says when it is under way, in the place of one of torch's.
    (tmp_path / "sitecustomize.py").write_text("")
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SEARCH_PATH]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "phalanx_command", "run", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (-signal.SIGINT, "", "")


def test_a_host_that_waits_says_for_whom_and_ends_by_a_signal(tmp_path: Path) -> None:
    options = ["--nproc", "1", "--nnodes", "2", "--endpoint", "127.0.0.1:29417"]
    with Running(tmp_path, SLOW_IMPORT, *options, PHALANX_SECRET=SECRET) as run:
        found = run.wait_for(r"phalanx: waiting since \d\d:\d\d:\d\d \(10 s\): (.*)")
        assert "at 127.0.0.1:29417 waits for hosts, 1 of 2 hosts here" in found[1], found[0]
        seen = below(run.process.pid)
        run.process.send_signal(signal.SIGTERM)
        assert run.end(20) == 128 + signal.SIGTERM
        assert "ended by SIGTERM" in run.said() and "Traceback" not in run.said()
        assert gone(run.process.pid, seen)
