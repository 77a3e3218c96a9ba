"""The checkpoints of a folder: listed, verified, compared, deleted by a policy. Must not know of torch.

A committed save may still be damaged afterwards: bits flip, files are lost, folders are copied half. `problems` finds
all of it, by hashes, and names file, rank and parameter.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from ...errors import ArgumentTypeError, ConfigError, StateError
from .disk import Disk
from .manifest import COMMITTED, Commit, Manifest, SaveName, data_file, digest, has_content, manifest_file, said

# A folder without a commit that nobody has written to for this long is of a save that was stopped.
ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One save of a folder. `fault` says why a commit that is there cannot be believed; without a commit it is None."""

    name: SaveName
    path: str
    commit: Commit | None
    fault: str | None = None

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def about(self) -> dict[str, Any]:
        return {} if self.commit is None else dict(self.commit.about)

    @property
    def metrics(self) -> dict[str, float]:
        """What was given to `save` with it."""
        return dict(self.about.get("metrics", {}))


def entries(disk: Disk, folder: str) -> list[Entry]:
    """Every save in a folder, committed or not, the oldest first."""
    names = filter(None, map(SaveName.parse, disk.names(folder)))
    return [_entry(disk, f"{folder}/{name}", name) for name in sorted(names)]


def _entry(disk: Disk, path: str, name: SaveName) -> Entry:
    try:
        commit = Commit.from_bytes(disk.read(f"{path}/{COMMITTED}"), f"{path}/{COMMITTED}")
    except FileNotFoundError:
        return Entry(name, path, None)
    except (StateError, OSError) as error:
        # Where a commit is not one rename, this is a save that was stopped while it committed.
        return Entry(name, path, None, str(error) if disk.renames_at_once else None)
    if commit.save != str(name):
        return Entry(name, path, None, f"{path}/{COMMITTED} is that of {commit.save}: the folder was renamed or mixed up.")
    return Entry(name, path, commit)


def never_committed(found: Sequence[Entry]) -> str:
    """A sentence on the latest of these saves without a commit; empty if there is none."""
    stopped = [entry for entry in found if entry.commit is None and entry.fault is None]
    if not stopped:
        return ""
    return (
        f"{stopped[-1].path} was never committed: the save was stopped before it was whole, or the folder was copied "
        "without its file COMMITTED."
    )


def next_number(disk: Disk, folder: str) -> int:
    """The number of the next save of a folder."""
    return 1 + max((name.number for name in map(SaveName.parse, disk.names(folder)) if name), default=0)


# -- integrity -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was saved."""

    file: str
    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}: rank {self.rank}: {self.text}"


def manifests(disk: Disk, entry: Entry) -> list[Manifest]:
    """Every rank's manifest. Raises StateError for the first that is not the one that was committed."""
    return [_manifest(disk, entry, rank) for rank in range(_committed(entry).world)]


def _committed(entry: Entry) -> Commit:
    if entry.commit is None:
        raise StateError(entry.fault or f"{entry.path} was never committed: it is what a save left that was stopped.")
    return entry.commit


def _manifest(disk: Disk, entry: Entry, rank: int) -> Manifest:
    path = f"{entry.path}/{manifest_file(rank)}"
    size, wanted = _committed(entry).manifests[rank]
    try:
        text = disk.read(path)
    except OSError as error:
        raise StateError(f"{path}: rank {rank}: {_missing(error)}.") from error
    if len(text) != size or digest(text) != wanted:
        raise StateError(
            f"{path}: rank {rank}: not the manifest that was committed ({len(text)} bytes, expected {size}): damaged, or of "
            "another save."
        )
    found = Manifest.from_bytes(text, path)
    if (found.save, found.rank, found.world) != (str(entry.name), rank, _committed(entry).world):
        raise StateError(f"{path}: rank {rank}: the manifest of rank {found.rank} of {found.world} of {found.save!r:.80}.")
    return found


def problems(disk: Disk, entry: Entry, ranks: Sequence[int] | None = None) -> Iterator[Problem]:
    """All that is wrong with the files of these ranks, of all by default. Reads every byte of them."""
    if entry.commit is None:
        yield Problem(f"{entry.path}/{COMMITTED}", 0, entry.fault or "never committed")
        return
    for rank in range(entry.commit.world) if ranks is None else ranks:
        try:
            manifest = _manifest(disk, entry, rank)
        except StateError as error:
            yield Problem(f"{entry.path}/{manifest_file(rank)}", rank, str(error).split(f"rank {rank}: ")[-1])
            continue
        yield from _data_problems(disk, entry, manifest)


def _data_problems(disk: Disk, entry: Entry, manifest: Manifest) -> Iterator[Problem]:
    path = f"{entry.path}/{data_file(manifest.rank)}"
    try:
        size = disk.size(path)
        view = disk.view(path, min(size, manifest.num_bytes))
    except OSError as error:
        yield Problem(path, manifest.rank, _missing(error))
        return
    for extent in manifest.extents:
        end = extent.offset + (extent.stop - extent.start) * manifest.tensors[extent.key].itemsize
        what = f"{said(extent.key)}, elements {extent.start} to {extent.stop}"
        if end > size:
            yield Problem(path, manifest.rank, f"truncated at {size} of {manifest.num_bytes} bytes, within {what}")
            return
        if not has_content(view[extent.offset : end], extent.digest):
            yield Problem(path, manifest.rank, f"damaged: {what} are not what was saved (bytes {extent.offset} to {end})")
    if size > manifest.num_bytes:
        yield Problem(path, manifest.rank, f"has {size} bytes, expected {manifest.num_bytes}: something was added")


def _view(disk: Disk, entry: Entry, manifest: Manifest) -> Any:
    """All bytes of a rank's file. Raises StateError unless there are as many as were saved."""
    path = f"{entry.path}/{data_file(manifest.rank)}"
    try:
        size = disk.size(path)
        if size >= manifest.num_bytes:
            return disk.view(path, manifest.num_bytes)
    except OSError as error:
        raise StateError(f"{path}: rank {manifest.rank}: {_missing(error)}.") from error
    raise StateError(f"{path}: rank {manifest.rank}: truncated at {size} of {manifest.num_bytes} bytes.")


def _missing(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


def newest_good(disk: Disk, found: Sequence[Entry]) -> Entry | None:
    """The latest of these saves with which nothing is wrong."""
    for entry in reversed(found):
        if entry.commit is not None and next(problems(disk, entry), None) is None:
            return entry
    return None


# -- comparing -------------------------------------------------------------------------------------


def differences(disk: Disk, one: Entry, other: Entry) -> Iterator[str]:
    """Where two checkpoints differ, tensor by tensor, by their hashes where they are cut alike and by bytes elsewhere."""
    first, second = _Contents(disk, one), _Contents(disk, other)
    for key in sorted(first.infos.keys() | second.infos.keys()):
        if key not in first.infos or key not in second.infos:
            yield f"{said(key)}: only in step {(one if key in first.infos else other).step}"
        elif first.infos[key] != second.infos[key]:
            yield f"{said(key)}: {_described(first.infos[key])} and {_described(second.infos[key])}"
        elif first.hashes[key] != second.hashes[key] and first.bytes_of(key) != second.bytes_of(key):
            yield f"{said(key)}: other values"


def _described(info: Any) -> str:
    return f"{info.dtype} of shape {info.shape}"


class _Contents:
    def __init__(self, disk: Disk, entry: Entry) -> None:
        self._views: list[Any] = []
        self._spans: dict[str, list[tuple[int, int, int, int]]] = {}
        self.infos: dict[str, Any] = {}
        self.hashes: dict[str, list[tuple[int, int, str]]] = {}
        for manifest in manifests(disk, entry):
            self._views.append(_view(disk, entry, manifest))
            self.infos.update(manifest.tensors)
            for extent in manifest.extents:
                size = (extent.stop - extent.start) * manifest.tensors[extent.key].itemsize
                self._spans.setdefault(extent.key, []).append((extent.start, manifest.rank, extent.offset, size))
                self.hashes.setdefault(extent.key, []).append((extent.start, extent.stop, extent.digest))
        for key in self.infos:
            # A tensor without elements has no extents.
            self._spans.setdefault(key, []).sort()
            self.hashes.setdefault(key, []).sort()

    def bytes_of(self, key: str) -> bytes:
        return b"".join(self._views[rank][offset : offset + size] for _, rank, offset, size in self._spans[key])


# -- deleting --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keep:
    """What not to delete: the `last` saves, those of every `every`-th step, and the `num_best` by a metric.

    `best` is the name of a metric given to `save`, the lowest being best; with a "-" before it, the highest.
    """

    last: int = 1
    every: int | None = None
    best: str | None = None
    num_best: int = 1
    abandoned_after_s: float = field(default=ABANDONED_AFTER_S)

    def __post_init__(self) -> None:
        for name in ("last", "every", "num_best"):
            given = getattr(self, name)
            if isinstance(given, bool) or not (isinstance(given, Integral) or (name == "every" and given is None)):
                raise ArgumentTypeError(f"{name} must be a whole number of checkpoints or steps, got {given!r:.80}.")
            # The writer is told in JSON, which knows Python's numbers only.
            object.__setattr__(self, name, None if given is None else int(given))
        if self.best is not None and not isinstance(self.best, str):
            raise ArgumentTypeError(f"best must be the name of a metric, got {self.best!r:.80}.")
        # Never none at all: a policy is no way to delete everything.
        if self.last < 1 or (self.every is not None and self.every < 1) or self.num_best < 1:
            raise ConfigError(f"a policy keeps something: last, every and num_best must be 1 or more, got {self}.")

    def check_metric(self, found: Sequence[Entry]) -> None:
        """A metric that nobody knows is a name misspelled, and its best one would go with the others."""
        if self.best is None or not found:
            return
        known = sorted({metric for entry in found for metric in entry.metrics})
        if self.best.lstrip("-") not in known:
            raise ConfigError(
                f"no checkpoint has the metric {self.best.lstrip('-')!r} by which the best is to stay; they have "
                f"{', '.join(known) or 'none'}. Nothing was deleted."
            )

    def keeps(self, found: Sequence[Entry]) -> set[SaveName]:
        """The names to keep, of committed saves in the order of their making."""
        kept = {entry.name for entry in found[-self.last :]}
        if self.every is not None:
            kept |= {entry.name for entry in found if entry.step % self.every == 0}
        if self.best is not None:
            metric, sign = self.best.lstrip("-"), -1 if self.best.startswith("-") else 1
            scored = [(entry.metrics.get(metric, math.nan), entry.name) for entry in found]
            # NaN is neither the lowest nor the highest, and in a sort anything.
            ranked = sorted((sign * value, name) for value, name in scored if not math.isnan(value))
            kept |= {name for _, name in ranked[: self.num_best]}
        return kept


def prune(disk: Disk, folder: str, keep: Keep, dry_run: bool = False) -> list[Entry]:
    """Delete what `keep` does not name, and what stopped saves left; returns what was (or would be) deleted.

    Raises ConfigError, with nothing deleted, if no checkpoint has the metric by which the best is to stay.
    """
    found = entries(disk, folder)
    committed = [entry for entry in found if entry.commit is not None]
    keep.check_metric(committed)
    kept = keep.keeps(committed)
    doomed = [entry for entry in committed if entry.name not in kept]
    # One with a fault is not counted and not deleted: somebody may want to look at it.
    doomed += [e for e in found if e.commit is None and e.fault is None and _is_abandoned(disk, e, keep.abandoned_after_s)]
    if not dry_run:
        for entry in doomed:
            delete(disk, entry)
    return doomed


def delete(disk: Disk, entry: Entry) -> None:
    """Delete one save. Stopped midway, it leaves a folder without a commit, never half a checkpoint.

    Of a save that is a link into another folder only the link goes: what it leads to is somebody else's.
    """
    if disk.is_link(entry.path):
        disk.remove(entry.path)
        return
    with contextlib.suppress(FileNotFoundError):
        disk.remove(f"{entry.path}/{COMMITTED}")
    disk.sync_folder(entry.path)
    disk.remove_folder(entry.path)


def _is_abandoned(disk: Disk, entry: Entry, after_s: float) -> bool:
    # No save makes a link: one that leads nowhere may be of an archive that is not mounted now.
    if disk.is_link(entry.path):
        return False
    paths = [entry.path, *(f"{entry.path}/{name}" for name in disk.names(entry.path))]
    latest = 0.0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, disk.modified(path))
    return time.time() - latest > after_s
