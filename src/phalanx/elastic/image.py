"""The state of a generation in memory that outlives its processes: every rank's share of it, as of its last two steps.

Written to the files of `launch.elastic.heads`. A slot holds tensors (laid out as a checkpoint's file is), then the layout as
JSON, then what is left, pickled: it is read by processes of this run only. A rank that is killed in the midst of writing
leaves the slot before.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.layout import Layout, Piece, fill
from ..checkpoint.reshard import Held, cover
from ..checkpoint.source import Source
from ..checkpoint.storage.manifest import Extent, Manifest, TensorInfo
from ..errors import StateError
from ..launch.elastic.heads import HEAD_BYTES, SLOT, VOID, Paths
from .mapped import grow, read_bytes, view_file


class SlotFile:
    """One slot as its rank writes it: mapped once, and again only when it has to grow."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.layout: Layout | None = None  # the one whose text is in the file
        self.text = b""
        # What was copied last: the pieces, where they go, and where they come from.
        self._copied: tuple[Sequence[Piece], list[torch.Tensor], list[torch.Tensor]] | None = None

    def reserve(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self.bytes.numel():
            self.bytes = grow(self._descriptor, num_bytes)
        return self.bytes[:num_bytes]

    def fill(self, pieces: Sequence[Piece], layout: Layout) -> None:
        """Copy the pieces to their places."""
        if self._copied is not None and self._copied[0] is pieces:
            _, targets, sources = self._copied
            torch._foreach_copy_(targets, sources)  # one call, where views of hundreds of places cost more than small copies
            return
        memory, self._copied = self.reserve(layout.num_bytes), None
        fill(memory, pieces, layout)
        if all(piece.values.device.type == "cpu" for piece in pieces):
            pairs = [(piece.values, at) for piece, at in zip(pieces, layout.places, strict=True) if piece.values.numel()]
            targets = [memory[at : at + values.nbytes].view(values.dtype) for values, at in pairs]
            self._copied = pieces, targets, [values for values, _ in pairs]

    def write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written

    def clear(self) -> None:
        """Give the memory back."""
        self.bytes, self.layout, self._copied = torch.empty(0, dtype=torch.uint8), None, None
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        self.bytes, self._copied = torch.empty(0, dtype=torch.uint8), None
        os.close(self._descriptor)


class RankImage:
    """This rank's files of one generation, for writing."""

    def __init__(self, paths: Paths, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._head = os.open(paths.head, os.O_RDWR | os.O_CLOEXEC)
        self._slots = [SlotFile(path) for path in paths.slots]
        self.written: tuple[tuple[int, int, int, int], torch.Tensor, bytes] | None = None
        """What was written last: the sizes in the slot's head, the tensors where they lie, and the bytes behind them."""

    def write(self, version: int, pieces: Sequence[Piece], layout: Layout, texts: Mapping[str, Any], rest: Any) -> None:
        """Make `version` the newest one that this rank has. The one before it stays."""
        slot, at = self._slots[version % 2], (version % 2) * SLOT.size
        # First of all: from here on the slot is neither its old version nor the new one.
        os.pwrite(self._head, SLOT.pack(VOID, 0, 0, 0), at)
        slot.fill(pieces, layout)
        if slot.layout is not layout:
            manifest = Manifest("", self._rank, self._world, layout.num_bytes, dict(layout.tensors), list(layout.extents))
            text = manifest.to_bytes()
            slot.write(text, layout.num_bytes)
            slot.layout, slot.text = layout, text
        data = pickle.dumps((dict(texts), rest), protocol=pickle.HIGHEST_PROTOCOL)
        slot.write(data, layout.num_bytes + len(slot.text))
        sizes = version, layout.num_bytes, len(slot.text), len(data)
        os.pwrite(self._head, SLOT.pack(*sizes), at)
        self.written = sizes, slot.bytes[: layout.num_bytes], slot.text + data

    def clear(self) -> None:
        """Hold nothing any more."""
        if any(slot.layout is not None for slot in self._slots):
            os.pwrite(self._head, 2 * SLOT.pack(VOID, 0, 0, 0), 0)
            self.written = None
            for slot in self._slots:
                slot.clear()

    def close(self) -> None:
        """Let go of the files. They stay where they are."""
        os.close(self._head)
        for slot in self._slots:
            slot.close()


class MappedSource(Source):
    """A state in files of several ranks, as of one version, for loading: looks like a checkpoint."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.where = f"the state in memory after step {self.version}"
        self.about = {"step": self.version}
        self.infos: dict[str, TensorInfo] = {}
        self.texts: list[dict[str, Any]] = []
        self._held: dict[str, list[Held]] = {}
        self._views: list[memoryview] = []

    def add(self, rank: int, view: memoryview, extents: Sequence[Extent]) -> None:
        """What the next rank has."""
        self._views.append(view)
        for extent in extents:
            held = Held(extent.start, extent.stop, rank, extent.offset)
            self._held.setdefault(extent.key, []).append(held)

    def sort(self) -> None:
        """All ranks have been added."""
        for places in self._held.values():
            places.sort(key=lambda held: held.start)

    def flat(self, key: str, start: int, stop: int) -> torch.Tensor:
        info = self.infos[key]
        dtype = getattr(torch, info.dtype)
        parts = []
        try:
            for held in cover(self._held.get(key, []), start, stop, info.itemsize):
                end = held.offset + (held.stop - held.start) * info.itemsize
                parts.append(torch.frombuffer(self._views[held.rank][held.offset : end], dtype=dtype))
        except LookupError as gap:
            raise StateError(f"{self.where}: '{key}': no rank has {gap.args[0]} of {info.numel}.") from None
        if not parts:
            return torch.empty(0, dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ImageSource(MappedSource):
    """The copies that the ranks of a generation wrote of one version."""

    def __init__(self, images: Sequence[Paths], version: int) -> None:
        super().__init__(version)
        self.rest: list[Any] = []
        for rank, paths in enumerate(images):
            self._add_slot(rank, paths, read_bytes(paths.head, 0, HEAD_BYTES))
        self.sort()

    def _add_slot(self, rank: int, paths: Paths, head: bytes) -> None:
        number = self.version % 2
        found, tensor_bytes, layout_bytes, rest_bytes = SLOT.unpack_from(head, number * SLOT.size)
        if found != self.version:
            raise StateError(f"{self.where}: rank {rank} has version {found}.")
        path = paths.slots[number]
        manifest = Manifest.from_bytes(read_bytes(path, tensor_bytes, layout_bytes), f"the layout of rank {rank}")
        texts, rest = pickle.loads(read_bytes(path, tensor_bytes + layout_bytes, rest_bytes))
        self.texts.append(texts)
        self.rest.append(rest)
        self.infos.update(manifest.tensors)
        self.add(rank, view_file(path, tensor_bytes), manifest.extents)
