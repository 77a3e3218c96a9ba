"""Each rank's output: kept in files, and passed on line by line while it is written.

`RankLogs` tells torch's elastic agent where a worker's streams go. A thread follows the files and hands every
line to a sink; what the line looks like on a terminal is the sink's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from phalanx.launch.rundir import RunDirectory
from phalanx.launch.worker import TRACE_DIRECTORY

STACKS_FILE = "PHALANX_STACKS_FILE"
"""Environment variable: where a worker writes its stacks when it is told to end."""

FOLLOW_INTERVAL_S = 0.04

Sink = Callable[[int, str, str], None]
"""Called with (rank, "stdout" or "stderr", line without its end)."""


@dataclass
class _Followed:
    rank: int
    stream: str
    path: Path
    file: BinaryIO | None = None
    rest: bytes = b""


@dataclass
class Follower:
    """Follows growing files from one thread. `close` passes on what is left, half lines included."""

    sink: Sink
    _files: list[_Followed] = field(default_factory=list)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def follow(self, rank: int, stream: str, path: Path) -> None:
        """Pass on what `path` holds and what is added to it. It need not exist yet."""
        self._files.append(_Followed(rank, stream, path))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-logs", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Pass on everything that was written, then stop. Closing twice is harmless."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for followed in self._files:
            self._pass_on(followed)
            if followed.rest:
                self._emit(followed, followed.rest)
                followed.rest = b""
            if followed.file is not None:
                followed.file.close()
        self._files.clear()

    def _run(self) -> None:
        while not self._closing.wait(FOLLOW_INTERVAL_S):
            for followed in list(self._files):
                self._pass_on(followed)

    def _pass_on(self, followed: _Followed) -> None:
        if followed.file is None:
            try:
                followed.file = open(followed.path, "rb")
            except FileNotFoundError:
                return
        data = followed.rest + followed.file.read()
        *lines, followed.rest = data.split(b"\n")
        for line in lines:
            self._emit(followed, line)

    def _emit(self, followed: _Followed, line: bytes) -> None:
        # A progress bar redraws one line with carriage returns; its last state is what a log should show.
        shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        self.sink(followed.rank, followed.stream, shown.decode("utf-8", "replace"))


class RankLogs(LogsSpecs):
    """Gives each worker its files in the run directory and follows them; a restart gets a new attempt."""

    def __init__(self, directory: RunDirectory, follower: Follower, tracing: bool) -> None:
        super().__init__(log_dir=str(directory.root))
        self._directory = directory
        self._follower = follower
        self._tracing = tracing
        self.attempt = 0
        self.ranks: tuple[int, ...] = ()

    @property
    def root_log_dir(self) -> str:
        return str(self._directory.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent at each start, with every local worker's environment, which we add to."""
        stdouts, stderrs, errors = {}, {}, {}
        self.attempt = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.ranks = tuple(int(envs[local]["RANK"]) for local in sorted(envs))
        for local, environ in envs.items():
            rank = int(environ["RANK"])
            files = self._directory.rank(self.attempt, rank)
            environ["TORCHELASTIC_ERROR_FILE"] = str(files.error)
            environ[STACKS_FILE] = str(files.stacks)
            if self._tracing:
                environ[TRACE_DIRECTORY] = str(self._directory.attempt(self.attempt))
            stdouts[local], stderrs[local] = str(files.stdout), str(files.stderr)
            errors[local] = str(files.error)
            self._follower.follow(rank, "stdout", files.stdout)
            self._follower.follow(rank, "stderr", files.stderr)
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=errors)
