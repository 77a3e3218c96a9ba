"""The files in memory in which a rank's state outlives it, and their heads. What is in them is `elastic.image`'s business.

Three per rank, held open by the launcher and reached through its entries in /proc, which only its own user may follow:

    head       per slot: version, bytes of tensors, bytes of the layout, bytes of the rest
    slot 0, 1  the state of two versions; version v is in slot v % 2

A slot's version is -1 while it is written. No rank can be two versions ahead of another, so that the newest version that
every rank has is always there, whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

SLOT = struct.Struct("<qqqq")
HEAD_BYTES = 2 * SLOT.size
VOID = -1
"""The version of a slot that holds nothing, or only a part."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where one rank's files are."""

    head: str
    slots: tuple[str, str]

    @classmethod
    def of(cls, value: Sequence[str]) -> Paths:
        head, first, second = value
        return cls(head, (first, second))


class Files:
    """One rank's files, as the launcher holds them."""

    def __init__(self, name: str) -> None:
        self._descriptors = [os.memfd_create(f"phalanx-{name}-{part}", os.MFD_CLOEXEC) for part in ("head", "0", "1")]
        for descriptor in self._descriptors:
            # Following the entry in /proc is refused to other users already; the mode refuses them a second time.
            os.fchmod(descriptor, 0o600)
        os.pwrite(self._descriptors[0], 2 * SLOT.pack(VOID, 0, 0, 0), 0)

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
    found = {int(SLOT.unpack_from(head, number * SLOT.size)[0]) for number in range(2)} if len(head) >= HEAD_BYTES else set()
    return found - {VOID}


def newest(heads: Sequence[bytes]) -> int:
    """The newest version that every rank has whole; VOID if there is none."""
    common = set.intersection(*map(versions, heads)) if heads else set()
    return max(common, default=VOID)
