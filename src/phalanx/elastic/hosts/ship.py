"""Slots of state on their way between ranks: first how large, then the bytes, straight out of memory files and into them.

A slot (`launch.elastic.heads`) is tensors, then the text of their layout, then the rest. Its head is written last, so that
one that has not arrived whole is none. Must not know why anything is sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...launch.elastic.heads import HEAD_BYTES, SLOT, VOID, Paths
from ..image import SlotFile
from ..mapped import map_path, read_bytes

Size = tuple[int, int, int, int]
"""Of a slot: its version, bytes of tensors, of the layout, of the rest."""


class Cargo:
    """A slot that is there, to be sent: its tensors where they lie, and a copy of what follows them."""

    def __init__(self, size: Size, tensors: torch.Tensor, tail: bytes) -> None:
        self.size = size
        self.parts = [part for part in (tensors, torch.frombuffer(bytearray(tail), dtype=torch.uint8)) if part.numel()]

    @classmethod
    def of(cls, paths: Paths, version: int) -> Cargo:
        """What a host keeps of a rank."""
        head, number = read_bytes(paths.head, 0, HEAD_BYTES), version % 2
        size: Size = SLOT.unpack_from(head, number * SLOT.size)
        tensors = map_path(paths.slots[number])[: size[1]]
        return cls(size, tensors, read_bytes(paths.slots[number], size[1], size[2] + size[3]))


class Hold(Protocol):
    """Where a slot arrives."""

    def open(self, size: Size) -> list[torch.Tensor]: ...

    def close(self, size: Size) -> None: ...


class MirrorHold:
    """Files of another rank, as the one writes them who keeps its mirror."""

    def __init__(self, paths: Paths) -> None:
        self._head = os.open(paths.head, os.O_RDWR | os.O_CLOEXEC)
        self._slots = [SlotFile(path) for path in paths.slots]
        self._is_empty = True

    def open(self, size: Size) -> list[torch.Tensor]:
        """Room for a slot. From here on it is neither what it was nor what comes."""
        self._is_empty = False
        version, num_tensors, *tail = size
        os.pwrite(self._head, SLOT.pack(VOID, 0, 0, 0), (version % 2) * SLOT.size)
        memory = self._slots[version % 2].reserve(num_tensors + sum(tail))
        parts = [memory[:num_tensors], memory[num_tensors : num_tensors + sum(tail)]]
        return [part for part in parts if part.numel()]

    def close(self, size: Size) -> None:
        """It has arrived whole."""
        os.pwrite(self._head, SLOT.pack(*size), (size[0] % 2) * SLOT.size)

    def clear(self) -> None:
        """Hold nothing any more."""
        if self._is_empty:
            return
        self._is_empty = True
        os.pwrite(self._head, 2 * SLOT.pack(VOID, 0, 0, 0), 0)
        for slot in self._slots:
            slot.clear()

    def let_go(self) -> None:
        """Of the files, which stay where they are."""
        os.close(self._head)
        self._head = -1  # a thread that was left behind must not write to whatever gets this number next
        for slot in self._slots:
            slot.close()


class PassingHold:
    """Files of this process's own in which a slot is kept for the ranks of its host, until all have taken it."""

    def __init__(self) -> None:
        self._descriptors = [os.memfd_create(f"phalanx-{part}", os.MFD_CLOEXEC) for part in ("head", "slot")]
        for descriptor in self._descriptors:
            os.fchmod(descriptor, 0o600)
        os.pwrite(self._descriptors[0], 2 * SLOT.pack(VOID, 0, 0, 0), 0)
        head, slot = (f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors)
        self.paths = Paths(head, (slot, slot), "", "")
        self._mirror = MirrorHold(self.paths)

    def open(self, size: Size) -> list[torch.Tensor]:
        return self._mirror.open(size)

    def close(self, size: Size) -> None:
        self._mirror.close(size)

    def let_go(self) -> None:
        self._mirror.let_go()
        for descriptor in self._descriptors:
            os.close(descriptor)


def ship(outgoing: Sequence[tuple[int, Cargo]], incoming: Sequence[tuple[int, Hold]]) -> None:
    """Send each cargo to its rank, and receive what comes from others; between two ranks, in the order of both lists."""
    # Everything is under way before anything is waited for: no order of ranks can stand in another's way.
    # Heads are named, since gloo does not hold what it sends.
    heads = [torch.tensor(cargo.size, dtype=torch.int64, device="cpu") for _, cargo in outgoing]
    works = [dist.isend(head, rank) for head, (rank, _) in zip(heads, outgoing, strict=True)]
    sizes = [torch.zeros(4, dtype=torch.int64, device="cpu") for _ in incoming]
    _wait([dist.irecv(size, source) for size, (source, _) in zip(sizes, incoming, strict=True)])
    arrived: list[Size] = [(*size.tolist(),) for size in sizes]
    works += [dist.isend(part, rank) for rank, cargo in outgoing for part in cargo.parts]
    rooms = [(source, hold.open(size)) for size, (source, hold) in zip(arrived, incoming, strict=True)]
    _wait([dist.irecv(part, source) for source, parts in rooms for part in parts])
    for size, (_, hold) in zip(arrived, incoming, strict=True):
        hold.close(size)
    _wait(works)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
