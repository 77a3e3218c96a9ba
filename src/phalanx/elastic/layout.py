"""What lies where in the file of a rank's state in place: pieces with the state of their slices, then all parameters.

    piece 0 | piece 1 | … | parameter 0 | parameter 1 | … | the text: this layout

The state of a piece is one range of bytes, so that one copy protects it. A piece is some slices of one shard, few enough to
stay in the cache while they are copied and stepped. Pure: no files, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..checkpoint.storage.manifest import ALIGNMENT, Extent, TensorInfo

# Of a piece that has several slices: two of the largest. Each piece is a call of the optimizer (0.05 ms), which smaller
# ones make more of; larger ones leave the cache before they are stepped (docs/design/elastic.md has the numbers).
MOST_NUMEL = 393216


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor: where its first byte is, the name of its dtype, its shape."""

    at: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """One slice: elements [start, stop) of parameter `number`, computed as [begin, end)."""

    number: int
    group: int
    start: int
    stop: int
    begin: int
    end: int
    is_scalar: bool
    """Of a parameter without dimensions, which optimizers may treat in another way."""
    state: dict[str, Leaf | None] | None
    """By name, None for what is None; None for a slice that has no state yet."""

    @property
    def is_edge(self) -> bool:
        return self.begin != self.start or self.end != self.stop


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Slices that are stepped together, and the bytes of their state."""

    slices: tuple[SlicePlace, ...]
    bounds: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """All of it. `params` are flat, in the order of the parameter's memory, all of them though the rank owns a part."""

    pieces: tuple[PiecePlace, ...]
    params: tuple[Leaf, ...]
    num_bytes: int

    @property
    def most_bytes(self) -> int:
        """Of the largest piece."""
        return max((end - begin for begin, end in (piece.bounds for piece in self.pieces)), default=0)


@dataclass
class Text:
    """What is written behind the tensors, for whoever reads them: as a checkpoint would say it, and for finishing a step."""

    layout: Layout
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """A slice before it has a place: `state` by name, (dtype, bytes per element, shape)."""

    number: int
    group: int
    bounds: tuple[int, int, int, int]
    is_scalar: bool
    state: dict[str, tuple[str, int, tuple[int, ...]] | None] | None

    @property
    def numel(self) -> int:
        return self.bounds[3] - self.bounds[2]


def grouped(sizes: Iterable[int], most: int) -> list[tuple[int, int]]:
    """Neighbours together, up to `most` elements or one that is larger: (first, last + 1) of each group."""
    found: list[tuple[int, int]] = []
    first = total = count = 0
    for size in sizes:
        if count > first and total + size > most:
            found.append((first, count))
            first, total = count, 0
        total, count = total + size, count + 1
    return [*found, (first, count)] if count > first else found


def lay_out(
    shards: Sequence[Sequence[SliceSpec]], params: Sequence[tuple[str, int, int]], at: int, most: int
) -> Layout:
    """From byte `at` on. `params` are (dtype, bytes per element, elements). A piece never spans two shards."""
    pieces: list[PiecePlace] = []
    at = _aligned(at)
    for shard in shards:
        for first, last in grouped((one.numel for one in shard), most):
            begin, slices = at, []
            for one in shard[first:last]:
                state, at = _place_state(one, at)
                slices.append(SlicePlace(one.number, one.group, *one.bounds, one.is_scalar, state))
            pieces.append(PiecePlace(tuple(slices), (begin, at)))
    leaves = []
    for dtype, itemsize, numel in params:
        leaves.append(Leaf(at, dtype, itemsize, (numel,)))
        at = _aligned(at + leaves[-1].num_bytes)
    return Layout(tuple(pieces), tuple(leaves), at)


def _place_state(one: SliceSpec, at: int) -> tuple[dict[str, Leaf | None] | None, int]:
    if one.state is None:
        return None, at
    placed: dict[str, Leaf | None] = {}
    for name, spec in one.state.items():
        placed[name] = leaf = None if spec is None else Leaf(at, *spec)
        # Each at the beginning of a cache line, as torch's own memory is.
        at = at if leaf is None else _aligned(at + leaf.num_bytes)
    return placed, at


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
