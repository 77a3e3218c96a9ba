"""The state for `torch.distributed.checkpoint.state_dict.get_state_dict`: whole parameters' tensors, held in parts.

A parameter's state has the parameter's shape and is cut anywhere, also in the midst of a row. The checkpoint knows boxes
only, so that every extent is told as a few of them. Elements [5, 17) of a tensor of 4 rows of 6:

    . . . . . x        one box of 1 × 1 at (0, 5)
    x x x x x x        one box of 1 × 6 at (1, 0)
    x x x x x .        one box of 1 × 5 at (2, 0)
    . . . . . .

So a checkpoint of a plain optimizer loads here, and one from here there, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ...errors import StateError
from ...plan import ParamSpec
from .checkpoint import ShardedLeaf
from .local_state import Extent
from .sharded_optimizer import ShardedOptimizer
from .tree import Leaf, rebuild

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one per dimension


def boxes(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """Elements [start, stop), counted row by row, as boxes in that order. Pure."""
    if len(sizes) <= 1:
        yield (start,)[: len(sizes)], (stop - start,)[: len(sizes)]
        return
    row = prod(sizes[1:])
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            count = (stop - start) // row
            yield (index, *(0 for _ in sizes[1:])), (count, *sizes[1:])
            start += count * row
            continue
        end = min(stop, (index + 1) * row)
        for offsets, extents in boxes(inside, inside + end - start, sizes[1:]):
            yield (index, *offsets), (1, *extents)
        start = end


class StateShard(ShardedLeaf):
    """A tensor of a parameter's shape of which this rank has some elements."""

    # Dimensions from the slowest to the fastest in memory, in which extents are counted: channels_last is not row by row.
    order: Sequence[int]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, extents: Sequence[Extent]
    ) -> StateShard:
        made: StateShard = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.order = order
        made.extents = [extent for extent in extents if extent.values.numel()]
        return made

    def _boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box in the parameter's own dimensions, and the memory in which it lies, of the same shape."""
        back = [self.order.index(dim) for dim in range(self.dim())]
        for extent in self.extents:
            done = 0
            for offsets, sizes in boxes(extent.start, extent.stop, [self.shape[dim] for dim in self.order]):
                values = extent.values[done : done + prod(sizes)].view(sizes).permute(back)
                done += prod(sizes)
                yield (tuple(offsets[dim] for dim in back), tuple(sizes[dim] for dim in back)), values

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for (offsets, _), values in self._boxes():
            if index.offset is not None and tuple(index.offset) == offsets:
                return values
        raise StateError(f"no part of {index.fqn} begins at {index.offset} on this rank.")


def memory_order(spec: ParamSpec) -> list[int]:
    """A parameter's dimensions from the slowest to the fastest."""
    return sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], dim))


def shards_of(sharded: ShardedOptimizer) -> dict[int, Any]:
    """Every parameter's state, its tensors as `StateShard`s over the live memory. Every rank calls it."""
    live, trees = sharded.described()

    def state_of(index: int) -> Any:
        spec = sharded.table.specs[index]

        def shard(leaf: Leaf) -> StateShard:
            extents = live.extents.get((index, leaf.path), ())
            if leaf.shape is not None:
                return StateShard(leaf.shape, range(len(leaf.shape)), leaf.dtype, extents)
            return StateShard(spec.shape, memory_order(spec), leaf.dtype, extents)

        return rebuild(trees[index], torch.device("cpu"), shard)

    return {index: state_of(index) for index in trees}
