"""A working directory that others can write to, such as /tmp: nothing that lies there is taken for a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.start.order import ENTRANCE
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(120)

# As the `phalanx` command, and unlike `python -m`, which trusts the working directory by its own account.
COMMAND = [sys.executable, "-P", "-m", "phalanx.cli.main"]
NAMES = ("torch", "json", "ctypes", "signal", "psutil", "phalanx")


def hostile(folder: Path) -> Path:
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'taken')!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    return folder


def run(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([*COMMAND, *command], cwd=folder, env=known, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_workers_take_no_module_from_the_working_directory(tmp_path: Path, workers: str) -> None:
    # One is started plainly, two are forked from a process with torch imported.
    home, shared = tmp_path / "home", hostile(tmp_path / "shared")
    home.mkdir()
    (home / "mine.py").write_text("word = 'found'")
    (home / "train.py").write_text("import mine, json, signal, psutil\nprint(mine.word, flush=True)")
    done = run(shared, "run", "-n", workers, "--run-dir", str(home / "runs"), str(home / "train.py"))
    assert not (shared / "taken").exists(), (shared / "taken").read_text()
    assert done.returncode == 0 and done.stdout.count("found") == int(workers), done


@pytest.mark.thorough
def test_pythonsafepath_is_obeyed(tmp_path: Path) -> None:
    # Python's own way to say that not even the script's folder is to be looked into.
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "train.py").write_text("import mine")
    done = run(tmp_path, "run", "-n", "1", "train.py", PYTHONSAFEPATH="1")
    assert done.returncode == 1 and "No module named 'mine'" in done.stderr


@pytest.mark.parametrize("installed", [True, False])
def test_the_working_directory_is_left_out_unless_the_package_is_there_alone(tmp_path: Path, installed: bool) -> None:
    (tmp_path / "phalanx").mkdir()
    program = [sys.executable, "-S", "-c", ENTRANCE + "print(repr(sys.path[0]))"]
    environ = {"PYTHONPATH": SEARCH_PATH} if installed else {}
    done = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout == "''\n") is not installed, done


def test_nor_does_a_benchmark(tmp_path: Path) -> None:
    shared = hostile(tmp_path / "shared")
    done = run(shared, "bench", "collectives", "--help")
    assert not (shared / "taken").exists(), (shared / "taken").read_text()
    assert done.returncode == 0 and "--quick" in done.stdout, done
