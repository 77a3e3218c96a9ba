"""From tensors to places in a rank's file: what is captured, and where each element of it goes.

The memory that the writer reads is an image of the file, so a place in one is the same place in the other.
Must not know whose tensors they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import StateError
from ..plan import ParamSpec, specs_of
from ..zero.partition.storage import flatten
from .reshard import share
from .storage.manifest import ALIGNMENT, Extent, TensorInfo, digest, pieces


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as it is written in a manifest."""
    return str(dtype).removeprefix("torch.")


def info_of_spec(spec: ParamSpec, dtype: torch.dtype) -> TensorInfo:
    """A tensor with the shape and strides of a parameter."""
    return TensorInfo(dtype_name(dtype), dtype.itemsize, spec.shape, spec.stride)


def spec_of(info: TensorInfo) -> ParamSpec:
    """The inverse, of which only shape and strides mean anything."""
    return ParamSpec("", info.shape, info.stride, getattr(torch, info.dtype), "cpu")


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of the whole tensor `info` from `start` on, which this rank has in `values`, flat."""

    key: str
    info: TensorInfo
    start: int
    values: torch.Tensor


def whole_piece(key: str, tensor: torch.Tensor) -> Piece:
    """All of a tensor: a view of its memory where that has no gaps. Raises StateError for what is not a dense tensor."""
    if tensor.layout != torch.strided or tensor.is_quantized or hasattr(tensor, "device_mesh"):
        raise StateError(f"'{key}' is a {type(tensor).__name__} of layout {tensor.layout}; only dense tensors can be saved.")
    data = tensor.detach()
    (spec,) = specs_of([(key, data)])
    return Piece(key, info_of_spec(spec, data.dtype), 0, flatten(data, spec))


@dataclass
class Captured:
    """What one rank has to say about a save: views of live tensors, and texts.

    `alike` are tensors that all ranks hold with the same bits, in the same order on every rank; each rank writes a share of
    them. `own` are this rank's.
    """

    alike: list[Piece] = field(default_factory=list)
    own: list[Piece] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that hold tensors of the same names and kinds alike."""
        return digest("\n".join(f"{one.key} {one.info}" for one in self.alike).encode())

    def mine(self, rank: int, world: int) -> list[Piece]:
        """All that this rank writes."""
        sizes = [(one.values.numel(), one.info.itemsize) for one in self.alike]
        parts = share(sizes, rank, world)
        chosen = [(self.alike[part.index], part) for part in parts]
        cut = [Piece(one.key, one.info, part.start, one.values[part.start : part.stop]) for one, part in chosen]
        return [*cut, *self.own]


@dataclass
class Layout:
    """Where pieces go: `places` by piece, in bytes."""

    num_bytes: int
    tensors: Mapping[str, TensorInfo]
    extents: Sequence[Extent]
    places: Sequence[int]


def lay_out(found: Iterable[Piece]) -> Layout:
    """One place after the other, each at a multiple of the alignment; long pieces as several extents."""
    at, tensors, extents, places = 0, {}, [], []
    for piece in found:
        at = -(-at // ALIGNMENT) * ALIGNMENT
        tensors[piece.key] = piece.info
        places.append(at)
        size = piece.info.itemsize
        for begin, end in pieces(piece.values.numel() * size):
            extents.append(Extent(piece.key, piece.start + begin // size, piece.start + end // size, at + begin))
        at += piece.values.numel() * size
    return Layout(at, tensors, extents, places)


def fill(memory: torch.Tensor, found: Sequence[Piece], layout: Layout) -> None:
    """The one copy that training waits for. Returns when it is done, on any device."""
    waits = False
    for piece, at in zip(found, layout.places, strict=True):
        values = piece.values
        if not values.numel():
            continue
        target = memory[at : at + values.numel() * values.element_size()].view(values.dtype)
        waits = waits or values.device.type != "cpu"
        target.copy_(values, non_blocking=True)
    if waits:
        # Once for all: each copy from an accelerator would wait for it by itself.
        torch.accelerator.synchronize()
