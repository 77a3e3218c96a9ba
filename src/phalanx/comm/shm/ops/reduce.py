"""Collectives that compute: all_reduce, reduce, reduce_scatter through shared memory.

Three ways, chosen by size and place, the same on all ranks:

- *inline*: small data is written to the control block before the opening step, and every rank reduces all of
  it for itself. One step in total.
- *in place*: data that lies in shared memory on every rank. Rank r reduces the r-th slice of
  everybody's tensor where it lies, and writes the result to everybody's. Two steps, no copy.
- *staged*: anything else, through the staging buffers, block by block. Each rank shows the slices that others
  reduce, and takes the result of each from its staging buffer. One step per block, and one.

Tensors are flat and contiguous here. The arithmetic is always in the order of the ranks, so that the result depends
neither on timing nor on which rank computes it. Sums and products of 16-bit floats are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...memory.extent import ALIGNMENT
from ..transport.call import ANY_ROOT, Call, ReduceOp, Signature, Verb, layout_of, signature
from ..transport.staging import BLOCK_BYTES, StagingBuffer
from ..transport.team import INLINE_BYTES, NOWHERE, Places, Team

_Operation = Callable[..., torch.Tensor]

# By the number of the ReduceOp.
_OPERATIONS: tuple[_Operation, ...] = (
    torch.add,
    torch.mul,
    torch.minimum,
    torch.maximum,
    torch.bitwise_and,
    torch.bitwise_or,
    torch.bitwise_xor,
)
_CARRIED_WIDE = (torch.float16, torch.bfloat16)
_ROUNDING = (ReduceOp.SUM, ReduceOp.PRODUCT)

# Elements a reduction handles at a time: what is read stays in the second-level cache until it is
# written to the last of its places.
CHUNK_BYTES = 256 * 1024
_MAX_PREPARED = 256


def slice_bounds(numel: int, num_slices: int, index: int, itemsize: int) -> tuple[int, int]:
    """Where slice `index` begins and ends. Slices begin at cache lines, so that no two ranks share one."""
    granule = ALIGNMENT // itemsize
    width = -(-numel // (num_slices * granule)) * granule
    return min(index * width, numel), min((index + 1) * width, numel)


class ReduceOperations:
    """The computing collectives of one team."""

    def __init__(self, team: Team, staging: StagingBuffer) -> None:
        self._team = team
        self._staging = staging
        self._size = team.size
        self._index = team.index
        # Views of everybody's memory, by where it lies. Bounded, because each keeps its mapping alive.
        self._prepared: dict[tuple[tuple[int, ...], int, torch.dtype], list[list[torch.Tensor]]] = {}

    def all_reduce(self, call: Call) -> None:
        """Replace the output by scale × the reduction over all ranks."""
        tensor = call.outputs[0]
        numel, dtype = tensor.numel(), tensor.dtype
        what = signature(Verb.ALL_REDUCE, dtype, numel, call.op, ANY_ROOT, call.scale)
        if numel * dtype.itemsize <= INLINE_BYTES:
            areas = self._team.inline(numel, dtype)
            # Before the opening step, which publishes it: that one step is all the waiting there is.
            areas[self._index].copy_(tensor)
            self._team.open(what, call.timeout)
            reduce_into(tensor, areas, call.op, call.scale)
            return
        place = self._team.memory.locate(tensor)
        own = Places(NOWHERE if place is None else place, self._staging.offset)
        if place is None:
            # The first block travels with the opening step, so that staging costs no step more.
            self._show_slices(tensor, 0)
        self._team.open(what, call.timeout, own)
        # Everybody's places are the same on all ranks, so all go the same way from here.
        places = self._team.places(own)
        if all(p.memory != NOWHERE for p in places):
            self._reduce_in_place(tuple(p.memory for p in places), what)
        else:
            self._join_staging(tensor, places, own)
            self._reduce_staged(tensor, what, places, receives=True)

    def reduce(self, call: Call) -> None:
        """Replace the output on rank `root` of the team; leave the others' as they are."""
        tensor, root = call.outputs[0], call.root
        numel, dtype = tensor.numel(), tensor.dtype
        what = signature(Verb.REDUCE, dtype, numel, call.op, root, call.scale)
        if numel * dtype.itemsize <= INLINE_BYTES:
            areas = self._team.inline(numel, dtype)
            areas[self._index].copy_(tensor)
            self._team.open(what, call.timeout)
            if root == self._index:
                reduce_into(tensor, areas, call.op, call.scale)
            return
        own = Places(staging=self._staging.offset)
        self._show_slices(tensor, 0)
        self._team.open(what, call.timeout, own)
        self._reduce_staged(tensor, what, self._team.places(own), receives=root == self._index)

    def reduce_scatter(self, call: Call) -> None:
        """Write scale × the reduction of everybody's input `index` to the output, which may be that input."""
        output, pieces, whole = call.outputs[0], call.inputs, call.whole
        sizes = tuple(piece.numel() for piece in pieces)
        dtype = output.dtype
        what = signature(
            Verb.REDUCE_SCATTER, dtype, sum(sizes), call.op, ANY_ROOT, call.scale, layout_of(sizes)
        )
        if what.numel * dtype.itemsize <= INLINE_BYTES:
            areas = self._team.inline(what.numel, dtype)
            _join(pieces, whole, areas[self._index])
            self._team.open(what, call.timeout)
            begin = sum(sizes[: self._index])
            sources = [area[begin : begin + sizes[self._index]] for area in areas]
            reduce_into(output, sources, call.op, call.scale)
            return
        place = None if whole is None else self._team.memory.locate(whole)
        own = Places(NOWHERE if place is None else place, self._staging.offset)
        if place is None:
            self._show_pieces(pieces, 0)
        self._team.open(what, call.timeout, own)
        places = self._team.places(own)
        if all(p.memory != NOWHERE for p in places):
            self._scatter_in_place(output, sizes, tuple(p.memory for p in places), what)
        else:
            if any(p.memory != NOWHERE for p in places):
                if place is not None:
                    self._show_pieces(pieces, 0)
                self._team.step()
            self._scatter_staged(output, pieces, what, places)

    # ---- in place

    def _chunks(
        self, offsets: tuple[int, ...], numel: int, dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        """Everybody's elements at `offsets`, cut into chunks; remembered, as buckets come again."""
        chunks = self._prepared.get((offsets, numel, dtype))
        if chunks is None:
            if len(self._prepared) == _MAX_PREPARED:
                self._prepared.clear()
            views = [self._team.view(index, at, numel, dtype) for index, at in enumerate(offsets)]
            split = [view.split(CHUNK_BYTES // dtype.itemsize) for view in views]
            chunks = self._prepared[offsets, numel, dtype] = [list(row) for row in zip(*split, strict=True)]
        return chunks

    def _reduce_in_place(self, offsets: tuple[int, ...], what: Signature) -> None:
        itemsize = what.dtype.itemsize
        begin, end = slice_bounds(what.numel, self._size, self._index, itemsize)
        mine = tuple(offset + begin * itemsize for offset in offsets)
        for sources in self._chunks(mine, end - begin, what.dtype) if end > begin else ():
            # Into rank 0's tensor, whichever rank computes: a later one would have to be read
            # before it is overwritten.
            target = sources[0]
            reduce_into(target, sources, what.op, what.scale)
            for other in sources[1:]:
                other.copy_(target)
        # Until they take this step, peers write to this rank's tensor: its owner must not see it before.
        self._team.step()

    def _scatter_in_place(
        self, output: torch.Tensor, sizes: tuple[int, ...], offsets: tuple[int, ...], what: Signature
    ) -> None:
        begin = sum(sizes[: self._index]) * what.dtype.itemsize
        mine = tuple(offset + begin for offset in offsets)
        numel = sizes[self._index]
        if numel:
            targets = output.split(CHUNK_BYTES // what.dtype.itemsize)
            for target, sources in zip(targets, self._chunks(mine, numel, what.dtype), strict=True):
                reduce_into(target, sources, what.op, what.scale)
        # Until they take this step, peers read this rank's input: its owner must not change it before.
        self._team.step()

    # ---- staged

    def _column(self, itemsize: int) -> int:
        """Elements of a block that belong to one rank.

        Rank s has the same column of every block, also of the last and shorter one: a rank fills the
        columns of others while those still read its own column of the block before last.
        """
        return BLOCK_BYTES // self._size // ALIGNMENT * ALIGNMENT // itemsize

    def _block_slices(self, tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
        itemsize = tensor.dtype.itemsize
        capacity = self._column(itemsize) * self._size
        part = tensor[block * capacity : (block + 1) * capacity]
        bounds = (slice_bounds(part.numel(), self._size, s, itemsize) for s in range(self._size))
        return [part[begin:end] for begin, end in bounds]

    def _show_slices(self, tensor: torch.Tensor, block: int) -> None:
        half = self._staging.own(tensor.dtype)
        column = self._column(tensor.dtype.itemsize)
        for s, piece in enumerate(self._block_slices(tensor, block)):
            if s != self._index:
                half[s * column : s * column + piece.numel()].copy_(piece)

    def _join_staging(self, tensor: torch.Tensor, places: list[Places], own: Places) -> None:
        """Let those whose tensor lies in shared memory, where not everybody's does, show it too."""
        if any(p.memory != NOWHERE for p in places):
            if own.memory != NOWHERE:
                self._show_slices(tensor, 0)
            self._team.step()

    def _reduce_staged(
        self, tensor: torch.Tensor, what: Signature, places: list[Places], receives: bool
    ) -> None:
        column = self._column(what.dtype.itemsize)
        num_blocks = -(-what.numel // (column * self._size))
        before: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        for block in range(num_blocks):
            halves = self._staging.turn(places, what.dtype)
            slices = self._block_slices(tensor, block)
            mine = slices[self._index]
            at = self._index * column
            sources = [half[at : at + mine.numel()] for half in halves]
            shown = sources[self._index]
            sources[self._index] = mine
            target = mine if receives else shown
            reduce_into(target, sources, what.op, what.scale)
            if receives:
                # Into this rank's own column of its own buffer. Peers take it from there after the next step, as
                # this rank now takes what they have computed of the block before.
                shown.copy_(mine)
                if before is not None:
                    self._collect(*before, column)
                before = (halves, slices)
            if block + 1 < num_blocks:
                # To the other half, where peers may still be reading this rank's own column (see `_column`).
                self._show_slices(tensor, block + 1)
            self._team.step()
        if before is not None:
            self._collect(*before, column)

    def _collect(self, halves: list[torch.Tensor], slices: list[torch.Tensor], column: int) -> None:
        for s, piece in enumerate(slices):
            if s != self._index:
                piece.copy_(halves[s][s * column : s * column + piece.numel()])

    def _show_pieces(self, pieces: Sequence[torch.Tensor], block: int) -> None:
        half = self._staging.own(pieces[0].dtype)
        column = self._column(pieces[0].dtype.itemsize)
        for s, piece in enumerate(pieces):
            if s != self._index:
                part = piece[block * column : (block + 1) * column]
                half[s * column : s * column + part.numel()].copy_(part)

    def _scatter_staged(
        self, output: torch.Tensor, pieces: Sequence[torch.Tensor], what: Signature, places: list[Places]
    ) -> None:
        column = self._column(what.dtype.itemsize)
        num_blocks = -(-max(piece.numel() for piece in pieces) // column)
        for block in range(num_blocks):
            halves = self._staging.turn(places, what.dtype)
            mine = pieces[self._index][block * column : (block + 1) * column]
            at = self._index * column
            sources = [half[at : at + mine.numel()] for half in halves]
            sources[self._index] = mine
            target = output[block * column : (block + 1) * column]
            reduce_into(target, sources, what.op, what.scale)
            if block + 1 < num_blocks:
                self._show_pieces(pieces, block + 1)
                # None after the last block: nothing goes back, and the next collective begins with a step.
                self._team.step()


def _join(pieces: Sequence[torch.Tensor], whole: torch.Tensor | None, target: torch.Tensor) -> None:
    if whole is not None:
        target.copy_(whole)
    else:
        torch.cat(list(pieces), out=target)


# ---- arithmetic


def reduce_into(
    target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp, scale: float = 1.0
) -> None:
    """Write scale × the reduction of `sources` to `target`, which may be the first source itself.

    All are flat, of one length and one dtype. `target` may be any of the sources.
    """
    operation = _OPERATIONS[op]
    if len(sources) == 1:
        if target is not sources[0]:
            target.copy_(sources[0])
        scale_in_place(target, scale)
    elif len(sources) > 2 and (_rounds_often(target.dtype, op) or _is_one_of(target, sources[2:])):
        # In a place of its own: wider, or because `target` is still to be read.
        wide = torch.float32 if target.dtype in _CARRIED_WIDE else target.dtype
        total = sources[0].to(wide, copy=True)
        for source in sources[1:]:
            operation(total, source, out=total)
        scale_in_place(total, scale)
        target.copy_(total)
    elif scale != 1.0 and _rounds_often(target.dtype, op):
        total = operation(sources[0].to(torch.float32), sources[1])
        scale_in_place(total, scale)
        target.copy_(total)
    else:
        operation(sources[0], sources[1], out=target)
        for source in sources[2:]:
            operation(target, source, out=target)
        scale_in_place(target, scale)


def _rounds_often(dtype: torch.dtype, op: ReduceOp) -> bool:
    # Two 16-bit terms are added in float32 and rounded once anyway; more, or a factor, are not.
    return dtype in _CARRIED_WIDE and op in _ROUNDING


def _is_one_of(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    address = target.data_ptr()
    return any(source.data_ptr() == address for source in sources)


def scale_in_place(tensor: torch.Tensor, scale: float) -> None:
    """Multiply by `scale`. Integers are divided by its inverse, a whole number."""
    if scale == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(scale)
    else:
        # A mean of integers: the quotient towards zero, as C and NCCL have it.
        tensor.div_(round(1 / scale), rounding_mode="trunc")
