"""Writing one rank's part of a save, and committing the save when every rank's part is there.

    COPIED      this rank's share lies in memory that the writer sees; training goes on
    WRITTEN     rank-N.bin and rank-N.json are there and synced
    COMMITTED   COMMITTED is there: from now on the save exists, on every rank
    FAILED      this or another rank could not write; the folder is nothing, and what was saved before is untouched

Ranks do not talk: each renames its manifest into place and then looks whether all of them are there. Whoever sees all
commits; the last one to rename always does, and if two do, both write the same. The writer is a process without torch
(`main`), started by the training process but not ended with it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CheckpointError, ConfigError, StateError
from .disk import Disk, disk_of
from .library import Keep, prune
from .manifest import COMMITTED, PIECE_BYTES, Commit, Extent, Manifest, content_hash, data_file, failure_file, manifest_file

WRITING, WRITTEN, DONE, FAILED, WARNING = "writing", "written", "committed", "failed", "warning"
"""What a report's "state" may be."""

# How long a folder in which nothing changes is looked at before the missing ranks are given up.
PATIENCE_S = 120.0
# Of a writer whose training process is gone. All ranks had come to the save, so that the others' parts grow by now, or never
# will: a process that lasts for minutes after a run that died is in nobody's interest.
_ORPHANS_PATIENCE_S = 5.0
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.25
_REPORT_EVERY_S = 0.5


@dataclass
class Job:
    """One save as the writer is told of it. The bytes are in memory, laid out as they will be in the file."""

    folder: str
    manifest: Manifest
    options: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] | None = None
    patience_s: float = PATIENCE_S
    shows_progress: bool = False

    def to_lines(self) -> bytes:
        header = {
            "folder": self.folder,
            "options": self.options,
            "keep": self.keep,
            "patience_s": self.patience_s,
            "shows_progress": self.shows_progress,
        }
        return json.dumps(header).encode() + b"\n" + self.manifest.to_bytes() + b"\n"

    @classmethod
    def from_lines(cls, header: bytes, manifest: bytes) -> Job:
        return cls(manifest=Manifest.from_bytes(manifest, "the job"), **json.loads(header))


Report = Callable[[dict[str, Any]], None]
IsOrphan = Callable[[], bool]


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class Save:
    """One job under way. `run` returns when the save is committed, and raises what went wrong.

    `pause` is called between two looks at the folder and returns for how long it waited. `is_orphan` says whether the
    training process that asked for it is gone.
    """

    def __init__(
        self,
        job: Job,
        image: memoryview,
        disk: Disk,
        report: Report,
        pause: Callable[[float], float] = _sleep,
        is_orphan: IsOrphan = lambda: False,
    ) -> None:
        self._job, self._image, self._disk, self._report, self._pause = job, image, disk, report, pause
        self._is_orphan = is_orphan
        self._manifest = job.manifest
        self._folder = f"{job.folder}/{job.manifest.save}"
        self._begun = time.monotonic()

    def run(self) -> None:
        rank = self._manifest.rank
        try:
            self._write()
            self._report({"state": WRITTEN})
            self._commit()
        except (OSError, StateError, CheckpointError) as error:
            self._leave_note(f"{type(error).__name__}: {error}")
            raise
        self._report({"state": DONE, "seconds": time.monotonic() - self._begun})
        if rank == 0 and self._job.keep is not None:
            # After the report: a checkpoint that could not be deleted is no failure of this one.
            try:
                prune(self._disk, self._job.folder, Keep(**self._job.keep))
            except (OSError, StateError, ConfigError) as error:
                self._report({"state": WARNING, "text": f"old checkpoints could not be deleted: {error}"})

    def _write(self) -> None:
        disk, manifest = self._disk, self._manifest
        disk.make_folder(self._folder)
        # Beside the writing: both let go of the interpreter, and past the page cache the disk needs no processor.
        with ThreadPoolExecutor(1) as beside:
            digests = beside.submit(_digests, self._image, manifest)
            handle = disk.create(f"{self._folder}/{data_file(manifest.rank)}")
            try:
                disk.pass_cache(handle)
                self._write_image(handle)
                disk.sync(handle)
            finally:
                disk.close(handle)
            found = digests.result()
        extents = [replace(extent, digest=one) for extent, one in zip(manifest.extents, found, strict=True)]
        whole = replace(manifest, extents=extents)
        disk.publish(self._folder, manifest_file(manifest.rank), whole.to_bytes(), str(manifest.rank))
        # Before anything is committed: a folder whose own name is lost in a power cut would take its commit with it.
        disk.sync_folder(self._job.folder)

    def _write_image(self, handle: Any) -> None:
        total, said = self._manifest.num_bytes, self._begun
        for begin in range(0, total, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, total)
            self._disk.write(handle, self._image[begin:end])
            now = time.monotonic()
            if now - said > _REPORT_EVERY_S:
                said = now
                self._report({"state": WRITING, "done": end, "of": total})

    # -- the commit ----------------------------------------------------------------------------

    def _commit(self) -> None:
        """Return when the save is committed, by whichever rank."""
        look_s, waited_s, before = _FIRST_LOOK_S, 0.0, None
        while not self._is_committed():
            waited_s += self._pause(look_s)
            look_s = min(1.5 * look_s, _LONGEST_LOOK_S)
            # As long as other ranks' files grow, they are only slow.
            sizes = self._sizes()
            if sizes != before:
                before, waited_s = sizes, 0.0
            elif waited_s > self._patience_s:
                raise CheckpointError(self._missing())

    @property
    def _patience_s(self) -> float:
        # Not where files are seen only when they are whole: there nothing grows while others write.
        is_short = self._disk.renames_at_once and self._is_orphan()
        return min(self._job.patience_s, _ORPHANS_PATIENCE_S) if is_short else self._job.patience_s

    def _is_committed(self) -> bool:
        """Whether the save is committed by now; commits it if this rank sees that it can be."""
        disk, manifest = self._disk, self._manifest
        names = set(disk.names(self._folder))
        if COMMITTED in names:
            # A rename shows all of a commit. Elsewhere it may be seen while it is being written.
            with contextlib.suppress(StateError):
                Commit.from_bytes(disk.read(f"{self._folder}/{COMMITTED}"), COMMITTED)
                # Whoever renamed it may not have synced it yet, and this rank is about to say that it is there for good.
                disk.sync_folder(self._folder)
                return True
        for rank in range(manifest.world):
            if failure_file(rank) in names and rank != manifest.rank:
                said = disk.read(f"{self._folder}/{failure_file(rank)}").decode(errors="replace")
                raise CheckpointError(f"rank {rank} could not write its part: {said}")
        # Where writing is not atomic, a second writer of the same commit could be stopped midway and take it away again.
        if not (disk.renames_at_once or manifest.rank == 0):
            return False
        if not all(manifest_file(rank) in names for rank in range(manifest.world)):
            return False
        texts = {rank: disk.read(f"{self._folder}/{manifest_file(rank)}") for rank in range(manifest.world)}
        try:
            for rank, text in texts.items():
                Manifest.from_bytes(text, manifest_file(rank))
        except StateError:
            return False  # still being written, on a storage that shows it already
        disk.publish(self._folder, COMMITTED, Commit.of(texts).to_bytes(), str(manifest.rank))
        return True

    def _sizes(self) -> list[tuple[str, int]]:
        found = []
        for name in self._disk.names(self._folder):
            with contextlib.suppress(OSError):
                found.append((name, self._disk.size(f"{self._folder}/{name}")))
        return found

    def _missing(self) -> str:
        names = set(self._disk.names(self._folder))
        ranks = [rank for rank in range(self._manifest.world) if manifest_file(rank) not in names]
        return (
            f"rank {self._manifest.rank} has written its part of {self._folder}, but nothing came from ranks {ranks} for "
            f"{self._patience_s:.0f} s. They died, or their folder is not the same one: all ranks must see one folder."
        )

    def _leave_note(self, text: str) -> None:
        """Tell the other ranks' writers, and give back what was used of a disk that may be full."""
        rank = self._manifest.rank
        with contextlib.suppress(OSError):
            names = set(self._disk.names(self._folder))
            # A rank that gave up before its manifest was there never makes one, so nobody can commit this save any more. Not
            # if a rank is only missing: it may be slow, and commit what this one has written.
            gave_up = [one for one in range(self._manifest.world) if one == rank or failure_file(one) in names]
            if any(manifest_file(one) not in names for one in gave_up):
                self._disk.remove(f"{self._folder}/{data_file(rank)}")
        with contextlib.suppress(OSError):
            self._disk.publish(self._folder, failure_file(rank), text.encode(), str(rank))


def _digests(image: memoryview, manifest: Manifest) -> list[str]:
    found = []
    for extent in manifest.extents:
        found.append(content_hash(image[extent.offset : extent.offset + _num_bytes(extent, manifest)]))
    return found


def _num_bytes(extent: Extent, manifest: Manifest) -> int:
    return (extent.stop - extent.start) * manifest.tensors[extent.key].itemsize


# -- the process -----------------------------------------------------------------------------------

END = b"\n"
"""A line in place of a job: there are no more."""


def serve(
    lines: Iterable[bytes], memory: int, disk_for: Callable[[Job], Disk], handle: int, is_orphan: IsOrphan = lambda: False
) -> None:
    """Write job after job, from the memory behind the descriptor `memory`, until END or until there are no more lines."""
    reading, mapping = iter(lines), MappedMemory(memory)
    for header in reading:
        if header == END:
            return
        job = Job.from_lines(header, next(reading))
        disk = disk_for(job)

        def report(value: dict[str, Any], job: Job = job, disk: Disk = disk) -> None:
            _show(job, value)
            with contextlib.suppress(OSError):  # the training process has died; its checkpoint is written all the same
                disk.tell(handle, json.dumps({"save": job.manifest.save, **value}).encode() + b"\n")

        run_job(job, mapping, disk, report, is_orphan)


class MappedMemory:
    """The training process's memory as the writer sees it: mapped once, and again when it has grown."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._pages: mmap.mmap | None = None

    def view(self, size: int) -> memoryview:
        """Its first `size` bytes; to be released before the next call."""
        if size and (self._pages is None or len(self._pages) < size):
            if self._pages is not None:
                self._pages.close()
            self._pages = mmap.mmap(self._memory, size, access=mmap.ACCESS_READ)
        return memoryview(b"") if not size or self._pages is None else memoryview(self._pages)[:size]


def run_job(job: Job, mapping: MappedMemory, disk: Disk, report: Report, is_orphan: IsOrphan = lambda: False) -> None:
    """One job, whatever comes of it: the last report says committed or failed."""
    image = mapping.view(job.manifest.num_bytes)
    try:
        Save(job, image, disk, report, is_orphan=is_orphan).run()
    except Exception as error:  # the boundary of the process: whatever it is, the training process raises it
        text = str(error)
        if isinstance(error, OSError):
            # A write has no name of its file; the folder says which disk is full.
            text = f"{error.filename or f'{job.folder}/{job.manifest.save}'}: {error.strerror or error}"
        report({"state": FAILED, "text": f"{type(error).__name__}: {text}"})
    finally:
        image.release()


def _show(job: Job, value: dict[str, Any]) -> None:
    if not job.shows_progress or value["state"] not in (WRITING, DONE, FAILED):
        return
    step = job.manifest.about.get("step")
    total = job.manifest.about.get("total_bytes", job.manifest.num_bytes) / 1e6
    if value["state"] == WRITING:
        line = f"step {step}: writing, {100 * value['done'] // value['of']} % of {total:.0f} MB"
    elif value["state"] == DONE:
        line = f"step {step}: saved, {total:.0f} MB in {value['seconds']:.1f} s\n"
    else:
        line = f"step {step}: not saved: {value['text']}\n"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\r\x1b[Kphalanx checkpoint: {line}")
        sys.stderr.flush()


def main(memory: int, parent: int) -> None:
    """The writer process of the training process `parent`: jobs on standard input, reports on standard output."""

    def is_orphan() -> bool:
        return os.getppid() != parent

    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, memory, lambda job: disk_of(job.folder, job.options), sys.stdout.fileno(), is_orphan)
    os._exit(0)  # nothing is left to flush, and standard output may be gone
