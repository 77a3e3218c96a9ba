"""The writer process of this rank, and the memory through which it gets what it writes.

Started at the first save and kept: a Python without torch, in a session of its own, so that neither a signal to the training
process's group nor its death ends it. It ends by itself when it has no job and its input is closed. The memory is an
anonymous file that both see: made once, filled by the training process, read by the writer; nobody copies it again.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import json
import mmap
import os
import queue
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..errors import CheckpointError
from .storage.disk import disk_of, is_remote
from .storage.writer import DONE, END, FAILED, WARNING, WRITTEN, Job, MappedMemory, run_job

# How long a process that ends waits for the other ranks' parts of its last save. Where they are healthy, they are there.
_OTHERS_S = 3.0

# Stands in for the packages above the writer's, whose own modules would import torch.
_BOOTSTRAP = """
import sys, types
sys.path.append({packages!r})
for name, folder in (("phalanx", {root!r}), ("phalanx.checkpoint", {root!r} + "/checkpoint")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]
from phalanx.checkpoint.storage.writer import main
main({memory}, {parent})
"""


class SharedMemory:
    """Bytes that the training process fills and the writer reads. Owned by this rank's Checkpointer."""

    def __init__(self) -> None:
        made = os.memfd_create("phalanx-checkpoint", os.MFD_CLOEXEC)
        # Above the standard streams: where one of them is closed, as of a daemon, it would have got that number, and in the
        # writer, which has streams of its own, it would be one of these.
        self.descriptor = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(made)
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def reserve(self, num_bytes: int, pinned: bool) -> torch.Tensor:
        """At least this much of it; the same memory as long as it is large enough."""
        if num_bytes > self.bytes.numel():
            self._unpin()
            os.ftruncate(self.descriptor, num_bytes)
            pages = mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        if pinned and not self._is_pinned and self.bytes.numel():
            # So that an accelerator copies into it by itself. Pageable memory would do, at half the speed.
            self._is_pinned = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0) == 0
        return self.bytes

    def _unpin(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_pinned = False

    def close(self) -> None:
        """Give the memory back. The writer keeps its own hold on it until it is done."""
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._finalizer()


class Writer(abc.ABC):
    """Whoever writes for this rank: one job at a time. `poll` says how it stands without waiting."""

    def __init__(self) -> None:
        self.save: str | None = None  # the job under way
        self._is_written = False  # this rank's part of it; those of others may be missing
        self.progress = ""
        self.warnings: list[str] = []
        self._outcome: str | None = None

    def submit(self, job: Job) -> None:
        """Begin to write. No other job is under way."""
        assert self.save is None, "one save at a time"
        self._start()
        self.save, self._outcome, self._is_written = job.manifest.save, None, False
        self.progress = f"step {job.manifest.about.get('step')}: {job.manifest.num_bytes / 1e6:.0f} MB to write"
        try:
            self._send(job)
        except BaseException:
            # Nobody would ever report on it. A writer that got half of the job must not read the next one as its rest.
            self.give_up()
            raise

    def poll(self, wait_s: float = 0.0) -> str | None:
        """None while the job runs, then "" if it was committed, or what went wrong. Then there is no job any more."""
        if self.save is not None:
            for report in self._reports(wait_s):
                self._take(report)
        if self.save is None or self._outcome is None:
            return None
        self.save = None
        return self._outcome

    def give_up(self) -> None:
        """Forget the job: another rank's part of it failed, so that it never comes to be."""
        self.save = None

    def _take(self, report: dict[str, Any]) -> None:
        if report["state"] == WARNING:
            self.warnings.append(report["text"])
        if report["save"] != self.save:
            return
        if "of" in report:
            self.progress = f"{self.progress.split(':')[0]}: {100 * report['done'] // report['of']} % written"
        self._is_written = self._is_written or report["state"] == WRITTEN
        if report["state"] in (DONE, FAILED):
            self._outcome = report.get("text", "")

    @abc.abstractmethod
    def _start(self) -> None:
        """Be ready for jobs; called before each, also after the writer has ended by itself."""

    @abc.abstractmethod
    def _send(self, job: Job) -> None:
        """Hand the job over."""

    @abc.abstractmethod
    def _reports(self, wait_s: float) -> list[dict[str, Any]]:
        """What the writer has said since the last call, after waiting so long for it at the most."""

    @abc.abstractmethod
    def close(self) -> None:
        """Return when the writer has written what it has. A commit that waits for other ranks it makes by itself."""


class WriterProcess(Writer):
    """A process of its own."""

    def __init__(self, memory: SharedMemory, folder: str, shows: bool) -> None:
        super().__init__()
        self._shows = shows
        self._memory = memory
        # Without the hooks of site-packages it starts twice as fast; only what fsspec imports may need them.
        self._flags = ["-I"] if is_remote(folder) else ["-I", "-S"]
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._owner = os.getpid()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        root = str(Path(__file__).resolve().parents[1])
        packages = str(Path(xxhash.__file__).resolve().parents[1])
        script = _BOOTSTRAP.format(root=root, packages=packages, memory=self._memory.descriptor, parent=os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, *self._flags, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not ours where nothing is to be shown: whoever reads our output to its end would wait for the writer too.
            stderr=None if self._shows else subprocess.DEVNULL,
            pass_fds=(self._memory.descriptor,),
            start_new_session=True,
            cwd="/",
        )
        self._unread = b""

    def _send(self, job: Job) -> None:
        assert self._process is not None and self._process.stdin is not None, "the writer has been started"
        try:
            self._process.stdin.write(job.to_lines())
            self._process.stdin.flush()
        except OSError as error:
            raise CheckpointError(f"the writer process {self._process.pid} has died: {error}.") from error

    def _reports(self, wait_s: float) -> list[dict[str, Any]]:
        assert self._process is not None and self._process.stdout is not None, "the writer has been started"
        waiting = select.poll()  # not select.select, which knows no descriptor above 1023
        waiting.register(self._process.stdout, select.POLLIN)
        if not waiting.poll(1e3 * wait_s):
            return []
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            code = self._process.wait()
            return [{"save": self.save, "state": FAILED, "text": f"the writer process died with exit code {code}"}]
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def give_up(self) -> None:
        super().give_up()
        if self._process is not None:
            # It holds nothing that anybody waits for; the next job gets a new one.
            self._process.kill()
            self.close()

    def close(self) -> None:
        # A forked child, a data loader's, has a copy of all this, and neither the process nor its output is its own.
        if self._process is None or os.getpid() != self._owner:
            return
        assert self._process.stdin is not None and self._process.stdout is not None, "both were asked for"
        with contextlib.suppress(OSError):
            # In so many words: a forked child, a data loader's that lives on, keeps this end of the pipe open as well.
            self._process.stdin.write(END)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._await_end(self._process)
        self._process.stdout.close()
        self._process = None

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the writer is gone, or waits for the parts of other ranks alone: it outlives this process.

        Those may have died, and who ends must not be held up by them: others would wait for it in turn.
        """
        assert process.stdout is not None, "it was asked for"
        waiting, unread = select.poll(), self._unread
        left_s = _OTHERS_S if self._is_written else None
        waiting.register(process.stdout, select.POLLIN)
        while waiting.poll(None if left_s is None else 1e3 * left_s):
            # Reports are read to the end: a pipe that is full would keep it waiting for us.
            if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                process.wait()
                return
            *lines, unread = (unread + data).split(b"\n")
            if any(json.loads(line)["state"] == WRITTEN for line in lines):
                left_s = _OTHERS_S


class WriterThread(Writer):
    """A thread of this process, for storages that no other process can reach (fsspec's memory)."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self._memory = memory
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        pass

    def _send(self, job: Job) -> None:
        disk = disk_of(job.folder, job.options)
        found, save = self._queue, job.manifest.save
        arguments = (job, MappedMemory(self._memory.descriptor), disk, lambda value: found.put({"save": save, **value}))
        self._thread = threading.Thread(target=run_job, args=arguments, name="phalanx-checkpoint", daemon=True)
        self._thread.start()

    def _reports(self, wait_s: float) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._queue.get(timeout=max(1e-4, wait_s)))
            while True:
                found.append(self._queue.get_nowait())
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(60.0)
            self._thread = None


def make_writer(folder: str, memory: SharedMemory, shows: bool) -> Writer:
    """The writer for a folder; with `shows`, one that has our standard error to show its progress on."""
    return WriterThread(memory) if folder.startswith("memory://") else WriterProcess(memory, folder, shows)
