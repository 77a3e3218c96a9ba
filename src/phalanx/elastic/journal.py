"""How far a step of a state in place has come, written down so that others can finish it: marks in the head, and a log.

    mark                     log         what a rank that dies here leaves
    (v, all, -)              anything    version v, whole
    (v + 1, k, not logged)   anything    pieces before k of v + 1, the others of v
    (v + 1, k, logged)       piece k     the same, but for piece k, which may be torn: the log has it as of v

A mark is one small write to the file, which a kill does not cut in two. Memory outlives the process, and a process that is
killed has done all that it did before: the order of marks and copies is all that matters. Must not know what pieces are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..errors import StateError
from ..launch.elastic.heads import HEAD_BYTES, NOTHING_IN_PLACE, PLACE_AT, REFUSAL, REFUSAL_AT, Paths, Progress
from .mapped import grow, map_whole

Bounds = tuple[int, int]


class Journal:
    """The marks and the log of one rank: held by the rank itself, or by who finishes a step for it."""

    def __init__(self, paths: Paths) -> None:
        self._head = os.open(paths.head, os.O_RDWR | os.O_CLOEXEC)
        self._log_file = os.open(paths.log, os.O_RDWR | os.O_CLOEXEC)
        self._log = map_whole(self._log_file)
        self._progress = Progress.of(os.pread(self._head, HEAD_BYTES, 0))

    @property
    def is_void(self) -> bool:
        """Whether nothing is in place."""
        return self._progress is None

    @property
    def progress(self) -> Progress:
        if self._progress is None:
            raise StateError("nothing of this rank's state is in place, so that no step of it can be finished.")
        return self._progress

    def open_at(self, version: int, num_pieces: int, text: Bounds, most_bytes: int) -> None:
        """All is in place, as of `version`; no piece has more than `most_bytes`."""
        if self._log.numel() < most_bytes:
            self._log = grow(self._log_file, most_bytes)
        self._mark(Progress(version, num_pieces, False, num_pieces, *text))

    def void(self) -> None:
        """What is in place is not the state any more."""
        os.pwrite(self._head, NOTHING_IN_PLACE, PLACE_AT)
        self._progress = None

    def refuse(self, version: int) -> None:
        """The step to `version` cannot be made in place. For `Votes` of the others, who look when all have come to it."""
        os.pwrite(self._head, REFUSAL.pack(version), REFUSAL_AT)

    def begin(self, version: int) -> None:
        """The step to `version` begins. Only when all ranks have all that it takes to finish it."""
        now = self.progress
        if not now.is_whole:
            raise StateError(
                f"step {now.version} was cut short after {now.done} of {now.num_pieces} pieces, "
                "by an error that the script went on from. Let errors of optimizer.step() end the training function."
            )
        self._mark(now.at(0, False, version))

    def protect(self, piece: int, memory: torch.Tensor, bounds: Bounds) -> None:
        """Before a piece is changed: those before it are done, and it can be put back."""
        begin, end = bounds
        self._log[: end - begin].copy_(memory[begin:end])
        # Not before: a mark without its copy would put back something else.
        self._mark(self.progress.at(piece, is_logged=True))

    def done(self, piece: int) -> None:
        """A piece is what the step makes of it."""
        self._mark(self.progress.at(piece + 1))

    def undo(self, memory: torch.Tensor, bounds: Bounds) -> None:
        """Put back the piece that may be torn. Whoever is killed in here leaves it to be put back again."""
        if self.progress.is_logged:
            begin, end = bounds
            memory[begin:end].copy_(self._log[: end - begin])
            self._mark(self.progress.at(self.progress.done))

    def finish(self) -> None:
        """All pieces are done; those without a gradient are what they were."""
        if not self.progress.is_whole:
            self._mark(self.progress.at(self.progress.num_pieces))

    def _mark(self, progress: Progress) -> None:
        os.pwrite(self._head, progress.pack(), PLACE_AT)
        self._progress = progress

    def close(self) -> None:
        """Let go of the files. They stay as they are."""
        os.close(self._head)
        os.close(self._log_file)
        self._log = torch.empty(0, dtype=torch.uint8)


class Votes:
    """The other ranks' answers to whether a step is to be made in place."""

    def __init__(self, paths: Sequence[Paths]) -> None:
        self._heads = [os.open(one.head, os.O_RDONLY | os.O_CLOEXEC) for one in paths]

    def has_refused(self, version: int) -> bool:
        """Whether any of them has refused the step to `version`. Asked when all have come to it, and none can be further."""
        read, unpack = os.pread, REFUSAL.unpack
        return any(unpack(read(head, REFUSAL.size, REFUSAL_AT)) == (version,) for head in self._heads)

    def close(self) -> None:
        for head in self._heads:
            os.close(head)
        self._heads = []
