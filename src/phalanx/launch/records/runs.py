"""The runs under one folder: which there are, which is the newest, and taking old ones away.

Touches only folders that hold a `run.json`, as `rundir` writes it, and never a run whose launcher is still alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.comm.failure.processes import began, identity
from phalanx.errors import ConfigError, StateError
from phalanx.launch.rundir import FACTS, RunDirectory


@dataclass(frozen=True)
class RunInfo:
    """One run, as its folder tells it."""

    path: Path
    facts: dict[str, Any]
    """Of its record; where many runs are listed, what `_LISTED` names."""
    written_s: float
    """When its record was last changed."""

    @property
    def is_running(self) -> bool:
        """Whether its launcher is alive, as far as can be known: on another host, whether it says that it runs."""
        if self.facts.get("state") != "running":
            return False
        pid = self.facts.get("pid")
        # A folder from elsewhere may say anything: what cannot be the number of a process is none.
        if not isinstance(pid, int) or not 0 < pid < 2**31 or self.facts.get("host") != socket.gethostname():
            return True
        if self._is_another(pid):
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _is_another(self, pid: int) -> bool:
        """Whether process `pid` is known not to be the launcher: numbers are used again, in containers soon."""
        recorded = self.facts.get("process")
        if not isinstance(recorded, dict) or recorded.get("host") != identity()["host"]:
            return False
        return bool(recorded.get("began")) and recorded["began"] != began(pid)

    @property
    def state(self) -> str:
        """As recorded, unless the launcher has gone without a word."""
        recorded = str(self.facts.get("state", "unknown"))
        return "launcher gone" if recorded == "running" and not self.is_running else recorded

    @property
    def is_traced(self) -> bool:
        return bool(self.facts.get("tracing"))

    def num_bytes(self) -> int:
        """What its files take on the disk."""
        total, folders = 0, [os.fspath(self.path)]
        # By a list: folders from elsewhere may be deeper than functions can call each other.
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:  # removed meanwhile, or not ours to see
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        return total


def list_runs(parent: str | os.PathLike[str]) -> list[RunInfo]:
    """The runs under `parent`, the newest first; none where the folder does not exist."""
    found = []
    for record in Path(parent).glob(f"*/{FACTS}"):
        try:
            facts = RunDirectory(record.parent).facts()
            found.append(RunInfo(record.parent, _listed(facts), record.stat().st_mtime))
        except (OSError, StateError):
            continue  # removed meanwhile, or torn by a full disk
    # By name first: it begins with the time at which the run was started.
    return sorted(found, key=lambda run: (run.path.name[:15], run.written_s), reverse=True)


# What is asked of a run in a list. All else goes at once: a record may be long, and take thirty times as much in memory, and
# there may be hundreds of them.
_LISTED = ("state", "pid", "host", "process", "seconds", "nproc", "tracing", "elastic")
_MOST_ITEMS, _MOST_LETTERS = 8, 200


def _listed(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in _LISTED if name in facts and _is_short(facts[name])}


def _is_short(value: Any, within: bool = False) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return not within and len(value) <= _MOST_ITEMS and all(_is_short(item, within=True) for item in items)
    return not isinstance(value, str) or len(value) <= _MOST_LETTERS


def newest(parent: str | os.PathLike[str], traced: bool = False) -> RunInfo:
    """The run that was started last; with `traced`, the last traced one where there is any."""
    runs = list_runs(parent)
    if not runs:
        raise ConfigError(f"there is no run under {parent}. Start one with phalanx run, or name a run directory.")
    return next((run for run in runs if run.is_traced), runs[0]) if traced else runs[0]


def remove(run: RunInfo) -> None:
    """Take a run's folder away, or a link to one that is elsewhere. A run that is still going on is refused."""
    if run.is_running:
        raise ConfigError(f"{run.path} is still running. End it first.")
    if run.path.is_symlink():
        run.path.unlink()
        return
    try:
        shutil.rmtree(run.path)
    except RecursionError:
        raise OSError(errno.ELOOP, "its folders are too deep, remove it with rm -r", str(run.path)) from None
