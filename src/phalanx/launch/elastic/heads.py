"""The files in memory in which a rank's state outlives it, and their heads. What is in them is `elastic.image`'s business.

Five per rank, held open by the launcher and reached through its entries in /proc, which only its own user may follow:

    head       per slot: version, bytes of tensors, bytes of the layout, bytes of the rest; then the progress in place, and
               the version to which the rank has refused to step there
    slot 0, 1  copies of the state of two versions; version v is in slot v % 2
    place      the state itself, where a divided optimizer steps it in place (`elastic.place`)
    log        what a piece of it was before the step that is under way

A slot's version is -1 while it is written. No rank can be two versions ahead of another, so that the newest version that
every rank has is always there, whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

SLOT = struct.Struct("<qqqq")
PLACE = struct.Struct("<qqqqqq")
PLACE_AT = 2 * SLOT.size
HEAD_BYTES = PLACE_AT + PLACE.size
REFUSAL = struct.Struct("<q")
REFUSAL_AT = HEAD_BYTES  # behind what is looked at after a loss: only a vote reads it
VOID = -1
"""The version of a slot that holds nothing, or only a part."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where one rank's files are."""

    head: str
    slots: tuple[str, str]
    place: str
    log: str

    @classmethod
    def of(cls, value: Sequence[str]) -> Paths:
        if not value:
            return NOWHERE
        head, first, second, place, log = value
        return cls(head, (first, second), place, log)


NOWHERE = Paths("", ("", ""), "", "")
"""Of a rank whose files are on other hosts."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank's state in place has come: pieces before `done` are of `version`, the others of the one before.

    Piece `done` may be torn if `is_logged`; what it was is then in the log. `text_at` and `text_bytes` say where in the file
    it is written what lies where.
    """

    version: int
    done: int
    is_logged: bool
    num_pieces: int
    text_at: int
    text_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.done == self.num_pieces

    def at(self, done: int, is_logged: bool = False, version: int | None = None) -> Progress:
        """The same file, further on. Not `dataclasses.replace`, which takes longer than the mark itself."""
        newest = self.version if version is None else version
        return Progress(newest, done, is_logged, self.num_pieces, self.text_at, self.text_bytes)

    def pack(self) -> bytes:
        return PLACE.pack(self.version, self.done, self.is_logged, self.num_pieces, self.text_at, self.text_bytes)

    @classmethod
    def of(cls, head: bytes) -> Progress | None:
        """What a head says; None if nothing is in place."""
        if len(head) < HEAD_BYTES:
            return None
        version, done, is_logged, *rest = PLACE.unpack_from(head, PLACE_AT)
        return None if version == VOID else cls(version, done, bool(is_logged), *rest)


NOTHING_IN_PLACE = PLACE.pack(VOID, 0, 0, 0, 0, 0)


_PARTS = ("head", "0", "1", "place", "log")


class Files:
    """One rank's files, as the launcher holds them."""

    def __init__(self, name: str) -> None:
        self._descriptors = [os.memfd_create(f"phalanx-{name}-{part}", os.MFD_CLOEXEC) for part in _PARTS]
        for descriptor in self._descriptors:
            # Following the entry in /proc is refused to other users already; the mode refuses them a second time.
            os.fchmod(descriptor, 0o600)
        os.pwrite(self._descriptors[0], 2 * SLOT.pack(VOID, 0, 0, 0) + NOTHING_IN_PLACE + REFUSAL.pack(VOID), 0)

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]

    def head(self) -> bytes:
        return os.pread(self._descriptors[0], HEAD_BYTES, 0)

    def close(self) -> None:
        """Let go; the memory is freed when the last process has."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def versions(head: bytes) -> set[int]:
    """The versions of both slots."""
    if len(head) < PLACE_AT:
        return set()
    return {int(SLOT.unpack_from(head, number * SLOT.size)[0]) for number in range(2)} - {VOID}


def copied(heads: Sequence[bytes]) -> int:
    """The newest version of which every rank has a whole copy; VOID if there is none."""
    common = set.intersection(*map(versions, heads)) if heads else set()
    return max(common, default=VOID)


def placed(heads: Sequence[bytes]) -> int:
    """The version to which the states in place are to be brought; VOID if some rank has none.

    Ranks begin a step in place only when all hold its gradients. So if any of them has begun, the dead ones too, the step is
    finished for all; to undo it, what was there before the first piece would be needed.
    """
    found = [Progress.of(head) for head in heads]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return VOID
    newest_begun = max(one.version for one in known)
    behind = [one for one in known if one.version != newest_begun]
    return newest_begun if all(one.version == newest_begun - 1 and one.is_whole for one in behind) else VOID


def newest(heads: Sequence[bytes]) -> int:
    """The newest version that can be had of every rank; VOID if there is none."""
    return max(copied(heads), placed(heads))
