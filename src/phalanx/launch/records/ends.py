"""Which workers of this host have ended, as their launcher knows: for ranks that wait where no group is yet.

`phalanx run` writes it down, rank by rank, in a file in memory that workers read through its entry in `/proc`, as the run's
store (`store`). torchrun tells nobody; but its workers are its children and have their rank in the environment that they
were started with, so that one that is not there any more is missed.

Owns both ways of knowing. Must not know what an end means: one that is expected (a rank that has done its part) is here too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from phalanx.comm.failure.processes import began, children_of, environ_of, parent_of
from phalanx.launch.variables import ENDS

_TORCHRUN = "TORCHELASTIC_RUN_ID"


class EndsFile:
    """The launcher's side: written by one process, read by its workers."""

    def __init__(self) -> None:
        # Without such files (not on Linux) nothing is known, and ranks wait for the time limit.
        self._descriptor = os.memfd_create("phalanx-ends", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else -1
        self.path = ""
        if self._descriptor >= 0:
            os.fchmod(self._descriptor, 0o600)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def begin(self) -> None:
        """Workers are about to be started anew: how those before them ended is not theirs."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)

    def note(self, rank: int, exitcode: int) -> None:
        """A worker has ended. In one write: whoever reads finds whole lines."""
        if self._descriptor >= 0:
            os.write(self._descriptor, f"{rank} {exitcode}\n".encode())

    def close(self) -> None:
        """Nobody reads it any more. Closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def ends_known_to(environ: Mapping[str, str]) -> Callable[[Collection[int]], Mapping[int, str]]:
    """A question to the launcher of the worker that has `environ`: which of these ranks have ended, and how, in words."""
    if environ.get(ENDS):
        return lambda ranks: _read(environ[ENDS], ranks)
    if environ.get(_TORCHRUN):
        return lambda ranks: _missed(environ, ranks)
    return lambda ranks: {}


def _read(path: str, ranks: Collection[int]) -> dict[int, str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}  # the launcher has ended, and this process is about to
    ended = {int(rank): int(code) for rank, code in (line.split() for line in lines)}
    return {rank: _how(code) for rank, code in ended.items() if rank in ranks}


def _how(exitcode: int) -> str:
    try:
        return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def _missed(environ: Mapping[str, str], ranks: Collection[int]) -> dict[int, str]:
    """Ranks of this host for which torchrun has no process any more."""
    try:
        first = int(environ["RANK"]) - int(environ["LOCAL_RANK"])
        mine = range(first, first + int(environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return {}
    # A script may run below a wrapper that torchrun started; so the way up goes on while it is the same rank's.
    pid = os.getpid()
    while _who(environ_of(parent_of(pid))) == _who(environ):
        pid = parent_of(pid)
    workers = [environ_of(child) for child in children_of(parent_of(pid)) if began(child)]
    alive = {worker["RANK"] for worker in workers if _who(worker)[1] == environ[_TORCHRUN] and "RANK" in worker}
    # One who does not find itself would miss everybody: it was started in some other way.
    if environ["RANK"] not in alive:
        return {}
    return {rank: "has ended" for rank in ranks if rank in mine and str(rank) not in alive}


def _who(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    return environ.get("RANK"), environ.get(_TORCHRUN)
