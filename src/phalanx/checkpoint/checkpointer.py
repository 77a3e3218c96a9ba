"""Checkpointer: save and restore a whole training run. Thin: it puts the parts together and lets ranks agree.

    a save       capture (views) → ranks agree → one copy into memory → a job for the writer; training goes on
    a restore    list → for the newest: read manifests, verify, check that it fits → ranks agree → change everything

What a save goes through after the copy is in `storage.writer`. Everything here runs in the thread that calls it.
"""

from __future__ import annotations

import logging
import secrets
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentTypeError, CheckpointError, ConfigError, MismatchError, StateError
from ..zero.optimizer import ZeroRedundancyOptimizer
from .agreement import Agreement
from .apply import Choice, Rename, Restoration, Restored, check_choice
from .capture import Subject, capture, check_parts, check_seconds, checked_metrics, folder_of
from .layout import Layout, Piece, fill, lay_out
from .process import SharedMemory, Writer, make_writer
from .safetensors import read_safetensors
from .source import CheckpointSource, Source, read_torch_file
from .storage.disk import disk_of, is_remote
from .storage.library import Entry, Keep, entries, never_committed, newest_good, next_number, problems
from .storage.manifest import Manifest, SaveName
from .storage.writer import PATIENCE_S, Job

logger = logging.getLogger("phalanx.checkpoint")

_LOOK_S = 0.2
# Of a storage that is slow, and shared. Ranks verify unequally many files, and who is done first waits for the others.
_SLOWEST_BYTES_PER_S = 20e6
_OFFER_S = 600.0  # how long rank 0 may read other checkpoints to find one that is whole
_PARTED_S = 1.0  # how long a save of ranks that are not together any more may take to end: the next one begins at once


class Damaged(StateError):
    """A checkpoint that is not as it was saved, for which an older one may stand in."""


class Checkpointer:
    """Saves and restores a training run: model, optimizer, scheduler, position in the data, random numbers, hooks.

    Every rank makes one, on the same folder, with its own objects, and calls the same methods in the same order. `model` may
    be plain, compiled or wrapped by phalanx's or torch's DistributedDataParallel; `optimizer` any of torch's,
    `phalanx.ZeroRedundancyOptimizer`, or a dict of several; `scheduler` and `loader` whatever has `state_dict` and
    `load_state_dict`; `extra` a dict of such objects, of generators, or of plain values. `folder` is seen by all ranks; with
    `protocol://` it is reached through fsspec. `keep` says which checkpoints stay when a new one is there; by default all.

    A save is a new folder, and exists once every rank's part is written and committed, in full; a crash at any moment before
    leaves what was there. Without a process group it is a checkpoint of one rank.
    """

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        keep: Keep | int | None = None,
        storage_options: dict[str, Any] | None = None,
        progress: bool = False,
        timeout_s: float = 60.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        text = self._given = folder_of(folder)
        check_parts(extra, storage_options, process_group)
        check_seconds(timeout_s=timeout_s, patience_s=patience_s)
        self.folder = text.rstrip("/") if is_remote(text) else str(Path(text).resolve())
        self._options = dict(storage_options or {})
        self._disk = disk_of(self.folder, self._options)
        if keep is not None and type(keep) is not int and not isinstance(keep, Keep):
            raise ArgumentTypeError(f"keep must be a number or a phalanx.checkpoint.Keep, got {keep!r}.")
        self._keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._subject = Subject(model, optimizer, {"scheduler": scheduler, "loader": loader}, extra)
        self._group, self._timeout_s = process_group, timeout_s
        self._agreement = Agreement(_choose_group(process_group, self._subject), timeout_s)
        self._shows, self._patience_s = progress and self.rank == 0, patience_s
        self._memory = SharedMemory()
        self._writer: Writer = make_writer(self.folder, self._memory, self._shows)
        self._failure: str | None = None
        self._step = -1
        # At the end of the process too: it may be the first of its container, which ends with it.
        self._finalizer = weakref.finalize(self, _let_go, self._writer, self._memory)

    @property
    def _me(self) -> str:
        return self._agreement.ranks.me

    @property
    def rank(self) -> int:
        """This process's number among those that save together."""
        return self._agreement.rank

    @property
    def world(self) -> int:
        """How many ranks save together."""
        return self._agreement.world

    # -- saving --------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Copy this rank's share and return; it is written and committed while training goes on. Every rank calls it.

        Waits first for a save that is still under way. Raises CheckpointError on every rank if that one failed, StateError
        on every rank if some rank cannot be saved now; then nothing is written. `metrics` are kept with the checkpoint, for
        `keep` and `phalanx checkpoints`; rank 0's count.
        """
        begun = time.perf_counter()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step must be a number of steps, 0 or more, got {step!r}.")
        if not self._finalizer.alive:
            raise StateError(f"{self._me}: this Checkpointer is closed, and saves nothing more. Make another one.")
        self._follow_group()
        self._finish()
        found, layout, texts, said = self._agree_on(step, metrics)
        name, total_bytes = said[0]["name"], sum(one["num_bytes"] for one in said)
        about = {"step": step, "metrics": said[0]["metrics"], "total_bytes": total_bytes, "time": time.time()}
        try:
            pinned = any(piece.values.device.type == "cuda" for piece in found)
            fill(self._memory.reserve(layout.num_bytes, pinned), found, layout)
            placed = (dict(layout.tensors), list(layout.extents))
            manifest = Manifest(name, self.rank, self.world, layout.num_bytes, *placed, texts, about)
            keep = None if self._keep is None else asdict(self._keep)
            self._writer.submit(Job(self.folder, manifest, self._options, keep, self._patience_s, self._shows))
        except BaseException as error:  # an interrupt too
            # The others have begun: their writers would wait for this rank's part until their patience ends.
            self._agreement.post_failure(name, f"{type(error).__name__}: {error}")
            raise
        self._step = step
        copied = time.perf_counter() - begun
        logger.info("rank %d: step %d: %.0f MB copied in %.3f s", self.rank, step, layout.num_bytes / 1e6, copied)

    def _agree_on(
        self, step: int, metrics: Mapping[str, float] | None
    ) -> tuple[list[Piece], Layout, dict[str, Any], list[dict[str, Any]]]:
        """What this rank has to write and where, its texts, and what all ranks said about theirs."""
        mine: dict[str, Any] = {"failure": self._failure, "error": None}
        found, layout, texts, raised = [], lay_out([]), {}, None
        if self._failure is None:
            try:
                captured = capture(self._subject, self.rank)
                found, texts = captured.mine(self.rank, self.world), captured.texts
                layout = lay_out(found)
                mine |= {"alike": captured.fingerprint, "num_bytes": layout.num_bytes, "metrics": checked_metrics(metrics)}
                mine["told"] = self._told()
                if self.rank == 0:
                    mine["name"] = self._new_name(step)
            except Exception as error:  # whatever a user's state_dict() raises: all ranks have to hear of it
                mine["error"], raised = f"{type(error).__name__}: {error}", error
                mine["is_of_disk"] = isinstance(error, CheckpointError)
        said = self._agreement.exchange(mine, f"save(step={step})")
        self._failure = None
        failures = [one["failure"] for one in said if one["failure"]]
        if failures:
            raise CheckpointError(f"{self._me}: {failures[0]}")
        if raised is not None:
            raise raised
        self._compare(step, said)
        return found, layout, texts, said

    def _new_name(self, step: int) -> str:
        """The name of the next save. Raises CheckpointError if there can be none here."""
        try:
            self._disk.make_root(self.folder)
            return str(SaveName(next_number(self._disk, self.folder), step, secrets.token_hex(4)))
        except OSError as error:
            text = f"{self.folder} cannot be written: {error.strerror or error}. Nothing was saved."
            raise CheckpointError(text) from error

    def _compare(self, step: int, said: list[dict[str, Any]]) -> None:
        """Raise, on every rank alike, unless all ranks can save and mean the same."""
        numbers = self._agreement.ranks.numbers
        for rank, one in zip(numbers, said, strict=True):
            if one["error"]:
                # Of one class on every rank: whoever trains on without this checkpoint must not end on one of them.
                kind = CheckpointError if one["is_of_disk"] else StateError
                raise kind(f"{self._me}: step {step} was not saved, as rank {rank} could not: {one['error']}")
            if one["alike"] != said[0]["alike"]:
                raise MismatchError(
                    f"{self._me}: step {step} was not saved: model and optimizer of rank {rank} have other tensors "
                    f"than those of rank {numbers[0]}. Every rank saves the same model."
                )
            for what, given in one["told"].items():
                if given != said[0]["told"][what]:
                    raise MismatchError(
                        f"{self._me}: step {step} was not saved: the Checkpointer of rank {rank} was made with {what} "
                        f"{given}, that of rank {numbers[0]} with {said[0]['told'][what]}. Every rank makes it with the "
                        "same, and all see one folder; where a host has it elsewhere, a link gives it the same name."
                    )

    def _told(self) -> dict[str, str]:
        """What the ranks' Checkpointers must have in common beside tensors. Of `extra` each rank may have its own."""
        subject = self._subject
        parts = [*(["model"] if subject.model is not None else []), *subject.optimizers, *subject.parts]
        # As given: what links resolve to may differ between the hosts that see one folder.
        return {"folder": self._given.rstrip("/"), "parts": ", ".join(parts) or "none"}

    def wait(self) -> None:
        """Return when the last save is committed, for every rank. Raises CheckpointError, on every rank, if it failed."""
        # Ranks need not meet: a commit is everybody's, and a rank that failed has told the others.
        self._finish()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._me}: {failure}")

    def _finish(self) -> None:
        """Wait until no save is under way here; how it ended is known then."""
        save = self._writer.save
        if save is None:
            return
        outcome = self._writer.poll()
        while outcome is None:
            outcome = self._writer.poll(_LOOK_S)
            # Only if the disk could not be told: then nobody else would ever know.
            elsewhere = self._agreement.failure(save) if outcome is None else None
            if elsewhere is not None:
                self._writer.give_up()
                outcome = elsewhere
        if outcome:
            self._note_failure(save, outcome)
        for text in self._writer.warnings:
            warnings.warn(f"{self._me}: {text}", stacklevel=4)
        self._writer.warnings.clear()

    def _note_failure(self, save: str, outcome: str) -> None:
        """Keep it for the next call, and tell the others, whose writers may wait for a part that never comes."""
        self._failure = f"the checkpoint of step {self._step} was not written: {outcome}"
        self._agreement.post_failure(save, outcome)

    def _follow_group(self) -> None:
        """In an elastic run ranks come and go, and the model is of another group then: those save together from now on."""
        group = _choose_group(self._group, self._subject)
        if self._agreement.is_of(group):
            return
        deadline, outcome = time.monotonic() + _PARTED_S, self._failure
        # The writer of a rank that is lost lives on, and mostly all parts come together. Not if the rank was lost before it
        # had begun: then nobody waits for it, and nobody fails either, since the next save is about to begin.
        while self._writer.save is not None and outcome is None:
            outcome = self._writer.poll(_LOOK_S)
            if outcome is None and time.monotonic() > deadline:
                self._writer.give_up()
                outcome = "some rank had not begun to write its part"
        if outcome:
            text = f"{self._me}: ranks were lost while step {self._step} was saved, and it is not: {outcome}."
            warnings.warn(f"{text} Those before it are untouched.", stacklevel=4)
        self._failure, self._agreement = None, Agreement(group, self._timeout_s)

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written here. Does not wait."""
        save = self._writer.save
        if save is not None:
            outcome = self._writer.poll()
            if outcome:
                self._note_failure(save, outcome)
        return self._writer.save is not None

    @property
    def progress(self) -> str:
        """A line on the save under way: how much of this rank's part is written."""
        return self._writer.progress if self.is_saving else "no save is under way"

    # -- restoring -----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, the oldest save first."""
        return [entry.step for entry in entries(self._disk, self.folder) if entry.commit is not None]

    def restore(
        self,
        step: int | None = None,
        *,
        parts: str | Sequence[str] | None = None,
        skip: str | Sequence[str] = (),
        rename: Rename = None,
        strict: bool = True,
        source: str | Path | None = None,
    ) -> Restored | None:
        """Load the newest checkpoint that is whole, that of `step`, or a file of torch.save or safetensors. On every rank.

        None, and nothing changed, if the folder has no checkpoint. It may be of another number of ranks, another partition,
        or of torch's own classes. `parts` chooses among "model", "optimizer", "scheduler", "loader", "extra", "random",
        "hook", "plan", "gradients"; `rename` maps saved names to the model's, by leading parts or by a function; `skip` are
        patterns of parameters to leave as they are. What was left out is in the result. A checkpoint that is damaged or
        does not fit raises StateError on every rank, and nothing is changed; without `step` a damaged one is passed over,
        with a warning.
        """
        self._follow_group()
        self._finish()
        check_choice(step, parts, skip)
        choice = Choice.of(parts, skip, rename, strict)
        if source is not None:
            read = read_safetensors if str(source).endswith(".safetensors") else read_torch_file
            found = self._prepared(lambda: read(str(source)), choice, f"the file{choice.in_words()}")
            assert found is not None, "a file that cannot be read has raised"
            return self._load(found)
        names, stopped = self._candidates(step, choice)
        if stopped and not names:
            # What a crash in the first save leaves. So does a copy that was not finished, and then the run would start anew.
            warnings.warn(f"{self._me}: {stopped} Nothing was restored.", stacklevel=2)
        damaged: list[str] = []
        for text, num_bytes in names.items():
            name = SaveName.parse(text)
            assert name is not None, "rank 0 has listed names of saves"
            entry = Entry(name, f"{self.folder}/{text}", None)
            work_s = num_bytes / _SLOWEST_BYTES_PER_S
            prepared = self._prepared(lambda entry=entry: self._verified(entry), choice, text, damaged, work_s)
            if prepared is not None:
                return self._load(prepared)
            if step is not None:
                raise StateError(f"{damaged[-1]} {self._offer(list(names))}")
            warnings.warn(f"{self._me}: {damaged[-1]} Passed over for an older one.", stacklevel=2)
        if damaged:
            raise StateError(
                f"no checkpoint in {self.folder} is whole. The newest: {damaged[0]} Put back a copy of the folder, or "
                "train into an empty one."
            )
        return None

    def _candidates(self, step: int | None, choice: Choice) -> tuple[dict[str, float], str]:
        """The saves to try, the newest first, with their sizes in bytes, and a word on those that were never committed.

        Rank 0's listing, since others may see another.
        """
        mine: dict[str, Any] = {"names": {}, "error": None, "stopped": ""}
        if self.rank == 0:
            try:
                there_are = entries(self._disk, self.folder)
                found = [entry for entry in there_are if entry.commit is not None or entry.fault]
                mine["stopped"] = never_committed(there_are)
                wanted = [entry for entry in reversed(found) if step is None or entry.step == step]
                mine["names"] = {str(entry.name): float(entry.about.get("total_bytes", 0)) for entry in wanted}
                if step is not None and not mine["names"]:
                    there = sorted({entry.step for entry in found})
                    mine["error"] = f"there is no checkpoint of step {step} in {self.folder}; there are {there or 'none'}."
            except OSError as error:
                mine["error"] = f"{self.folder} cannot be read: {error}"
        said = self._agreement.exchange(mine, f"restore(step={step}{choice.in_words()})")
        if said[0]["error"]:
            raise StateError(f"{self._me}: {said[0]['error']}")
        names: dict[str, float] = said[0]["names"]
        return names, str(said[0]["stopped"])

    def _verified(self, entry: Entry) -> Source:
        """A checkpoint of which this rank has verified its share of the files. Raises Damaged."""
        found = {one.name: one for one in entries(self._disk, self.folder)}
        if entry.name not in found:
            raise Damaged(f"{entry.path}: {self._me} does not see it. All ranks must see one folder.")
        try:
            entry = found[entry.name]
            source = CheckpointSource(self._disk, entry)
            for problem in problems(self._disk, entry, range(self.rank, source.world, self.world)):
                raise Damaged(f"{problem}.")
        except (StateError, OSError) as error:
            raise Damaged(str(error)) from error
        return source

    def _prepared(
        self, read: Any, choice: Choice, what: str, damaged: list[str] | None = None, work_s: float = 0.0
    ) -> Restoration | None:
        """All checks, on all ranks; None if what was read is damaged, which goes to the list.

        `work_s` is how long any rank may read. It is known before: a rank that finds damage at once waits for those that
        go on reading.
        """
        mine: dict[str, Any] = {"damage": None, "error": None}
        prepared: Restoration | None = None
        try:
            prepared = Restoration(self._subject, read(), choice, self.rank, self.world)
        except Damaged as error:
            mine["damage"] = str(error)
        except Exception as error:  # all ranks have to hear of it before any of them changes something
            mine["error"] = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
        said = self._agreement.exchange(mine, f"restoring {what}", work_s=work_s)
        ranks = self._agreement.ranks
        for rank, one in zip(ranks.numbers, said, strict=True):
            if one["damage"]:
                text = one["damage"] if rank == ranks.own else f"(seen by rank {rank}) {one['damage']}"
                if damaged is None:
                    raise StateError(text)
                damaged.append(text)
                return None
        for rank, one in zip(ranks.numbers, said, strict=True):
            if one["error"]:
                raise StateError(one["error"] if rank == ranks.own else f"rank {rank}: {one['error']}")
        return prepared

    def _load(self, prepared: Restoration) -> Restored:
        raised: Exception | None = None
        try:
            result = prepared.run()
        except Exception as error:  # whatever a user's load_state_dict() raises: the others are waiting for this rank
            raised = error
        mine = {"error": None if raised is None else f"{type(raised).__name__}: {raised}"}
        # Ranks that share the memory of parameters must not step before the last of them has loaded.
        unless = "What was saved is loaded on this rank, but not on all."
        said = self._agreement.exchange(mine, "restored", unless, _reading_s(prepared.source))
        if raised is not None:
            raise raised
        for rank, one in zip(self._agreement.ranks.numbers, said, strict=True):
            if one["error"]:
                raise StateError(
                    f"rank {rank} could not load all of {prepared.result.path}: {one['error']}. The ranks are not alike any "
                    "more: end the run, and restore without the part that does not fit (parts=)."
                )
        prepared.finish()
        for line in result.left_out:
            logger.info("rank %d: left out: %s", self.rank, line)
        return result

    def _offer(self, tried: Sequence[str]) -> str:
        """What else could be restored. Rank 0 looks, reading every byte of what it offers."""
        mine: dict[str, Any] = {"offer": None}
        if self.rank == 0:
            others = [entry for entry in entries(self._disk, self.folder) if str(entry.name) not in tried]
            good = newest_good(self._disk, others)
            mine["offer"] = None if good is None else good.step
        step = self._agreement.exchange(mine, "looking for another checkpoint", work_s=_OFFER_S)[0]["offer"]
        if step is None:
            return "No other checkpoint in the folder is whole."
        return f"The newest good checkpoint is that of step {step}: restore(step={step})."

    # -- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way and end the writer; raises what `wait` would. Called by `with` at its end."""
        try:
            if self._finalizer.alive:
                self.wait()
        finally:
            self._finalizer()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # The others may never call `wait`; the writer finishes by itself.
            self._finalizer()


def _reading_s(source: Source) -> float:
    """How long a rank may take for its part of a checkpoint, beyond the time limit for coming at all."""
    return float(source.about.get("total_bytes", 0)) / _SLOWEST_BYTES_PER_S


def _let_go(writer: Writer, memory: SharedMemory) -> None:
    writer.close()
    memory.close()


def _choose_group(group: dist.ProcessGroup | None, subject: Subject) -> dist.ProcessGroup | None:
    if group is not None:
        return group
    if subject.wrapper is not None and getattr(subject.wrapper, "process_group", None) is not None:
        found: dist.ProcessGroup = subject.wrapper.process_group
        return found
    for one in subject.optimizers.values():
        if isinstance(one, ZeroRedundancyOptimizer):
            return one.process_group
    return dist.group.WORLD if dist.is_initialized() else None
