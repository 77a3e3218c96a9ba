"""One program under one launcher, from its start to its end: exit codes, what was said, what was left behind.

Whoever runs cases is a "subreaper": whatever a case leaves, however deep below, becomes a child of this process, so that
it is found without relying on what the process says of itself.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from phalanx.launch.start import starter
from tests.cluster import reserved_port
from tests.cluster.command import Command
from tests.cluster.leaks import shm_leaks, shm_names
from tests.cluster.process import SEARCH_PATH

LAUNCHERS = ("bare", "spawn", "torchrun", "phalanx")
LIMIT_S = 120.0
_PR_SET_CHILD_SUBREAPER = 36
_ENDING_S = 5.0
# What torch's launchers put into the folder for temporary files and leave there.
_OF_TORCH = ("torchelastic_", "torchinductor_", "torch_", "pytorch-errorfile-")


@dataclass
class Outcome:
    """What became of a case."""

    codes: list[int | None] = field(default_factory=list)
    """Of the processes that a user, or a scheduler, would have started; None of one that had to be killed."""
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ending_s: float | None = None
    """From a signal to the end."""
    left: list[str] = field(default_factory=list)
    """Processes and files that were still there."""

    @property
    def said(self) -> str:
        return "\n".join(self.texts)


def adopt_orphans() -> None:
    """From now on the orphans below this process are its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def commands(launcher: str, world: int, program: list[str]) -> list[list[str]]:
    """One command per process that the user, or a scheduler, would start."""
    warmly = [sys.executable, "-m", "tests.soak.programs.warmly"]
    if launcher == "torchrun":
        return [[*warmly, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *program]]
    if launcher == "phalanx":
        return [[sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", str(world), "--grace", "2", *program]]
    if launcher == "spawn":
        return [[*warmly, *program]]
    return [[sys.executable, *program] for _ in range(world)]


class Case:
    """The processes of a case while they run."""

    def __init__(self, launcher: str, world: int, program: list[str], folder: Path) -> None:
        self.launcher, self._folder = launcher, folder
        self._shm, self._tmp = shm_names(), set(os.listdir(tempfile.gettempdir()))
        base = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        base |= {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        self.started, self._files, self.processes = time.monotonic(), [], []
        with reserved_port() as port:
            for rank, command in enumerate(commands(launcher, world, program)):
                environ = {**base, "MASTER_PORT": str(port)}
                if launcher == "bare":
                    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                    environ |= {name: str(value) for name, value in ranks.items()}
                file = open(folder / f"output-{rank}", "w+")
                self._files.append(file)
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                self.processes.append(Command(command, cwd=folder, env=environ, start_new_session=True, **streams))

    def tell(self, number: int) -> None:
        """Send a signal as a terminal would: to whatever is in the foreground. Launchers put their workers out of it."""
        for process in self.processes:
            told = [psutil.Process(process.pid)]
            if self.launcher == "spawn":
                told += [child for child in told[0].children() if child.pid not in _starters(told[0])]
            for one in told:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)

    def end(self, wait: Callable[[Command, float], int | None] | None = None) -> Outcome:
        """Wait for all, until the time limit; then see what is left, and end it."""
        outcome = Outcome()
        for process in self.processes:
            outcome.codes.append((wait or _wait)(process, self.started))
        outcome.seconds = time.monotonic() - self.started
        outcome.left = [*self._processes_left(), *shm_leaks(self._shm), *self._files_left()]
        for file in self._files:
            file.seek(0)
            outcome.texts.append(file.read())
            file.close()
        return outcome

    def _processes_left(self) -> list[str]:
        deadline = time.monotonic() + _ENDING_S
        while (found := _below()) and time.monotonic() < deadline:
            time.sleep(0.05)
        words = []
        for process in found:
            with suppress(psutil.NoSuchProcess):
                words.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]} ({process.status()})")
                process.kill()
        while _below():
            time.sleep(0.05)
        return words

    def _files_left(self) -> list[str]:
        new = set(os.listdir(tempfile.gettempdir())) - self._tmp
        return [f"file {name}" for name in sorted(new) if not name.startswith(_OF_TORCH)]


def _wait(process: Command, started: float) -> int | None:
    try:
        return process.wait(max(started + LIMIT_S - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.wait()
        return None


def _starters(process: psutil.Process) -> set[int]:
    """Of the children of a process, the one from which its others are forked: it alone leads a session."""
    found = set()
    for child in process.children():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                found.add(child.pid)
    return found


def _below() -> list[psutil.Process]:
    """Everything below this process but its starter; what has ended is reaped on the way."""
    own = starter.kept_for({**os.environ, "PYTHONUNBUFFERED": "1"})
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid == (None if own is None else own.pid):
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


def temporary_folder() -> str:
    """Make a folder, and in it one for the temporary files of all cases: what is left there was left by a case."""
    folder = tempfile.mkdtemp(prefix="phalanx-soak-")
    place = os.path.join(folder, "tmp")
    os.mkdir(place)
    os.environ["TMPDIR"] = tempfile.tempdir = place
    return folder
