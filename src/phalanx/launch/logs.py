"""Each rank's output: kept in files, and passed on line by line while it is written.

Workers write into pipes. One thread, `Keeper`, moves what comes out of them into files and does nothing else, so
that a slow terminal never makes a worker wait; another, `Follower`, reads the files and hands every line to a sink.
What the line looks like on a terminal is the sink's business. When a file cannot be written any more, the disk being
full, the keeper says so once and gives what follows to the follower directly: a script never fails by its own prints.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from phalanx.comm.failure.waiting import Notice
from phalanx.launch.rundir import RankFiles, RunDirectory, open_private
from phalanx.launch.variables import STACKS_FILE, TRACE_DIRECTORY
from phalanx.observe.live.pulse import STATUS_FILE

FOLLOW_INTERVAL_S = 0.04
_PIPE_BYTES = 1 << 20  # what a worker may be ahead of the keeper
_TAIL_BYTES = 8192
_PIECE_BYTES = 1 << 20  # what the follower reads at once, however far it is behind

Sink = Callable[[int, str, str], None]
"""Called with (rank, "stdout" or "stderr", line without its end)."""


@dataclass(eq=False)
class _Followed:
    rank: int
    stream: str
    path: Path
    file: BinaryIO | None = None
    rest: bytearray = field(default_factory=bytearray)
    """Of a line that has not ended: its last state, if it is drawn again and again."""
    unkept: deque[bytes] = field(default_factory=deque)
    """What came after the file could not be written any more."""
    is_ended: bool = False
    """Nothing more will come."""


@dataclass
class Follower:
    """Follows growing files from one thread. `close` passes on what is left, half lines included."""

    sink: Sink
    _files: list[_Followed] = field(default_factory=list)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def follow(self, rank: int, stream: str, path: Path) -> _Followed:
        """Pass on what `path` holds and what is added to it, until that is ended. It need not exist yet."""
        followed = _Followed(rank, stream, path)
        self._files.append(followed)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-logs", daemon=True)
            self._thread.start()
        return followed

    def close(self) -> None:
        """Pass on everything that was written, then stop. Closing twice is harmless."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for followed in list(self._files):
            followed.is_ended = True
            while self._pass_on(followed):
                pass

    def _run(self) -> None:
        is_behind = False
        while not self._closing.wait(0 if is_behind else FOLLOW_INTERVAL_S):
            # A list: each has its turn, however far another is behind.
            is_behind = any([self._pass_on(followed) for followed in list(self._files)])

    def _pass_on(self, followed: _Followed) -> bool:
        """Pass on a piece of what is there; whether there may be more."""
        # Both before the file is read to its end: what is in the file by then came first.
        is_ended, num_unkept = followed.is_ended, len(followed.unkept)
        if followed.file is None:
            try:
                followed.file = open(followed.path, "rb")
            except FileNotFoundError:
                pass  # it could not be made: all that there is is unkept
            except OSError:
                return False  # no descriptor is left now
        piece = followed.file.read(_PIECE_BYTES) if followed.file is not None else b""
        self._split(followed, piece)
        if not piece:
            for _ in range(num_unkept):
                self._split(followed, followed.unkept.popleft())
            if is_ended:
                self._drop(followed)
        return bool(piece)

    def _drop(self, followed: _Followed) -> None:
        if followed.rest:
            self._emit(followed, bytes(followed.rest))
        if followed.file is not None:
            followed.file.close()
        self._files.remove(followed)

    def _split(self, followed: _Followed, piece: bytes) -> None:
        head, *lines = piece.split(b"\n")
        followed.rest += head
        if lines:
            self._emit(followed, bytes(followed.rest))
            for line in lines[:-1]:
                self._emit(followed, line)
            followed.rest = bytearray(lines[-1])
        if b"\r" in piece:
            # A progress bar may never end its line: what it drew before is not kept, or each look would take longer.
            del followed.rest[: followed.rest.rstrip(b"\r").rfind(b"\r") + 1]

    def _emit(self, followed: _Followed, line: bytes) -> None:
        # A progress bar redraws one line with carriage returns; its last state is what a log should show.
        shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        self.sink(followed.rank, followed.stream, shown.decode("utf-8", "replace"))


@dataclass
class _Kept:
    rank: int
    stream: str
    path: Path
    reader: int
    writer: int
    """Our own end of the pipe, until the worker that is started has a copy."""
    followed: _Followed
    file: int | None
    tail: bytes = b""


class Keeper:
    """Moves what workers write from pipes into files. The thread lives from the first `keep` to `close`."""

    def __init__(self, follower: Follower, notice: Notice) -> None:
        self._follower = follower
        self._notice = notice
        self._selector = selectors.DefaultSelector()
        self._kept: list[_Kept] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False

    def keep(self, rank: int, stream: str, path: Path) -> int:
        """A descriptor for a worker to write to; all that it writes goes to `path`. It stays ours, until `let_go`."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        with contextlib.suppress(OSError):  # a limit of the system; the usual size will do
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        kept = _Kept(rank, stream, path, reader, writer, self._follower.follow(rank, stream, path), None)
        try:
            kept.file = open_private(path)
        except OSError as error:
            self._give_up(kept, error)
        self._kept.append(kept)
        self._selector.register(reader, selectors.EVENT_READ, kept)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-keeper", daemon=True)
            self._thread.start()
        return writer

    def let_go(self) -> None:
        """Workers have been started with their ends: with ours closed, a pipe ends with the last process that writes to it.

        And takes no descriptor any more, of which a run that starts its workers again and again would have none left.
        """
        for kept in self._kept:
            if kept.writer >= 0:
                os.close(kept.writer)
                kept.writer = -1

    def tails(self) -> dict[int, str]:
        """The end of each rank's stderr in its latest start, also where no file could hold it."""
        return {kept.rank: kept.tail.decode("utf-8", "replace") for kept in self._kept if kept.stream == "stderr"}

    def close(self) -> None:
        """Move what is left, then stop. The workers have ended. Closing twice is harmless."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for kept in self._kept:
            # Once, which takes all that fits into a pipe: a process that a worker left behind may write for ever.
            if kept.reader >= 0:
                self._move(kept)
            if kept.reader >= 0:
                self._end(kept)
        self.let_go()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=0.1):
                self._move(key.data)

    def _move(self, kept: _Kept) -> None:
        try:
            data = os.read(kept.reader, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(kept)
            return
        kept.tail = (kept.tail + data)[-_TAIL_BYTES:]
        self._put(kept, data)

    def _end(self, kept: _Kept) -> None:
        self._selector.unregister(kept.reader)
        os.close(kept.reader)
        kept.reader = -1
        if kept.file is not None:
            os.close(kept.file)
            kept.file = None
        kept.followed.is_ended = True

    def _put(self, kept: _Kept, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and kept.file is not None:
                view = view[os.write(kept.file, view) :]
        except OSError as error:
            self._give_up(kept, error)
        if view:
            kept.followed.unkept.append(bytes(view))

    def _give_up(self, kept: _Kept, error: OSError) -> None:
        if kept.file is not None:
            os.close(kept.file)
            kept.file = None
        if not self._told:
            self._told = True
            self._notice(
                f"{kept.path} cannot be written: {error.strerror}. The run goes on; what rank {kept.rank} and others say "
                "from now on is shown here, and kept only where the disk still takes it."
            )


class RankLogs:
    """Gives each worker its files in the run directory and follows them; every start gets a new attempt."""

    def __init__(self, directory: RunDirectory, keeper: Keeper, tracing: bool) -> None:
        self._directory = directory
        self._keeper = keeper
        self._tracing = tracing
        self.attempt = -1

    def begin_attempt(self) -> None:
        """Workers are about to be started."""
        self.attempt += 1

    def started(self) -> None:
        """Those that were prepared have been started."""
        self._keeper.let_go()

    def files(self, rank: int) -> RankFiles:
        """A rank's files of the latest start."""
        return self._directory.rank(self.attempt, rank)

    def prepare(self, environ: MutableMapping[str, str]) -> tuple[int, int]:
        """Tell a worker in its environment where its files are; returns its standard output and standard error."""
        rank = int(environ["RANK"])
        files = self.files(rank)
        environ["TORCHELASTIC_ERROR_FILE"] = str(files.error)
        environ[STACKS_FILE] = str(files.stacks)
        environ[STATUS_FILE] = str(files.status)
        if self._tracing:
            environ[TRACE_DIRECTORY] = str(self._directory.attempt(self.attempt))
        return self._keeper.keep(rank, "stdout", files.stdout), self._keeper.keep(rank, "stderr", files.stderr)
