"""Several workers: a file stays together, quiet tests are alone at the end, and limits against hangs are longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import schedule
from tests.cluster import PATIENCE
from tests.cluster.process import ROOT

FILE = """
import os, time
import pytest

def note(request, name):
    begun = time.monotonic()
    time.sleep(0.02)
    limit_s = request.node.get_closest_marker("timeout").args[0]
    with open(os.environ["NOTES"], "a") as notes:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
        notes.write(f"{__file__[-4]} {name} {worker} {limit_s} {begun} {time.monotonic()}\\n")

@pytest.mark.quiet
@pytest.mark.timeout(40)
def test_quiet(request):
    note(request, "quiet")

@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", range(4))
def test_loud(request, number):
    note(request, "loud")
"""


def _started(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A pytest run of its own over the files in a folder, with what our conftest does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", f"--rootdir={folder}", *options, str(folder)],
        cwd=ROOT,
        env=environment | {"NOTES": str(folder / "notes")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Notes:
    """A run of three files of five tests, and what each test wrote down."""

    def __init__(self, folder: Path, *options: str) -> None:
        for name in "abc":
            (folder / f"test_{name}.py").write_text(FILE)
        with _started(folder, *options) as run:
            said, _ = run.communicate(timeout=100 * PATIENCE)
        assert re.search(r"=+ 15 passed.* in [\d.]+s =+\n$", said), said
        lines = [line.split() for line in (folder / "notes").read_text().splitlines()]
        self.loud = [line for line in lines if line[1] == "loud"]
        self.quiet = [line for line in lines if line[1] == "quiet"]


@pytest.mark.thorough
def test_files_stay_together_and_quiet_tests_come_last_and_alone(tmp_path: Path) -> None:
    notes = Notes(tmp_path, "-n", "2")
    homes = {(file, worker) for file, _, worker, *_ in notes.loud}
    assert len(homes) == 3 and {worker for _, worker in homes} == {"gw0", "gw1"}
    assert len({worker for _, _, worker, *_ in notes.quiet}) == 1 and len(notes.quiet) == 3
    assert min(float(line[-2]) for line in notes.quiet) >= max(float(line[-1]) for line in notes.loud)
    assert {line[3] for line in notes.loud} == {"60.0"} and {line[3] for line in notes.quiet} == {"120.0"}


@pytest.mark.thorough
def test_without_workers_a_file_runs_as_it_is_written(tmp_path: Path) -> None:
    notes = Notes(tmp_path, "-p", "no:xdist")
    assert {line[2] for line in (*notes.loud, *notes.quiet)} == {"none"}
    assert {line[3] for line in notes.loud} == {"20"}
    assert [float(line[-2]) for line in notes.quiet] < [float(line[-2]) for line in notes.loud]


FOREVER = """
import os, time

def test_forever():
    with open(os.environ["NOTES"] + ".part", "w") as notes:
        notes.write(str(os.getpid()))
    os.rename(os.environ["NOTES"] + ".part", os.environ["NOTES"])
    time.sleep(1000)
"""


@pytest.mark.thorough
def test_workers_do_not_outlive_a_killed_controller(tmp_path: Path) -> None:
    (tmp_path / "test_forever.py").write_text(FOREVER)
    with _started(tmp_path, "-n", "1") as run:
        while not (tmp_path / "notes").exists():
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        worker = psutil.Process(int((tmp_path / "notes").read_text()))
        assert worker.ppid() == run.pid
        run.kill()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_files_to_begin_with_exist() -> None:
    assert [name for name in schedule.HEAVIEST if not (ROOT / "tests" / name).is_file()] == []
