"""Which rank owns what of a plan, and what has to move when that changes.

Element partition. Every bucket is cut into `world` equal shards; rank r owns the r-th. Two ranks, a bucket
of a[70] b[130] c[6], 206 elements, shards of 103:

    rank 0   a[0:70]  b[0:33]          rank 1   b[33:130]  c[0:6]

Parameter partition. Whole parameters go to ranks, the largest first, each to the rank with the least so far.

A rank's shard of a bucket consists of slices, each of one parameter. A kernel computes most elements in
vectors and the last few one by one, and the two may round differently. So that an element comes out the same
wherever its parameter is cut, slices begin at multiples of `UNIT` elements from the parameter's beginning and
end at one, or with the parameter. The unit with the cut in it becomes a slice of its own on both sides, an
edge, computed in full by both and owned in part by each. In the example, b is cut at 33:

    rank 0   b[0:33] owned, b[0:64] computed        rank 1   b[33:64] owned, b[0:64] computed;  b[64:130]

Pure: no process group, no tensors. Offsets are in elements, within a parameter in the order of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from .buckets import Bucket, BucketPlan

# At least the elements that any kernel of torch treats as one vector step, and a multiple of every such number.
UNIT = 64


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Elements [start, stop) of parameter `param`, owned; computed as [begin, end), which contains them."""

    param: int
    start: int
    stop: int
    begin: int
    end: int

    @property
    def is_edge(self) -> bool:
        """Whether elements are computed that another rank owns."""
        return self.begin != self.start or self.end != self.stop

    @property
    def numel(self) -> int:
        """How many elements are owned."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements [start, stop) of some parameter belong to `rank`."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True, slots=True)
class Move:
    """Elements [start, stop) of parameter `param` go from rank `source` to rank `target`."""

    param: int
    start: int
    stop: int
    source: int
    target: int


# Of each parameter, the ranges that cover it in order; a parameter without elements has one empty range.
Ownership = tuple[tuple[OwnedRange, ...], ...]


def shard_numel(numel: int, world: int) -> int:
    """Elements of each of `world` equal shards that cover `numel`; the last ones may reach beyond."""
    return -(-numel // world)


def shard_bounds(numel: int, world: int, rank: int) -> tuple[int, int]:
    """The part of the rank's shard that lies inside `numel` elements."""
    size = shard_numel(numel, world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def _ranges(bucket: Bucket, world: int) -> list[tuple[int, OwnedRange]]:
    """(parameter, owned range) of a bucket cut into shards, in the order of the bucket."""
    size = max(shard_numel(bucket.numel, world), 1)  # a bucket of empty parameters alone has shards of nothing
    found = []
    for slot in bucket.slots:
        at, end = slot.offset, slot.offset + slot.numel
        if not slot.numel:
            # Its state has no elements but it may have a count of steps, which somebody must keep.
            found.append((slot.param, OwnedRange(0, 0, min(at // size, world - 1))))
        while at < end:
            rank = at // size
            stop = min((rank + 1) * size, end)
            found.append((slot.param, OwnedRange(at - slot.offset, stop - slot.offset, rank)))
            at = stop
    return found


def _cut(param: int, numel: int, start: int, stop: int, max_numel: int | None) -> list[ParamSlice]:
    """The slices of one owned range: an edge, whole units, an edge; what is empty is left out."""
    if start == stop:
        # An empty parameter is still stepped, by its owner.
        return [ParamSlice(param, start, stop, start, stop)]
    inner_start = min(-(-start // UNIT) * UNIT, stop)
    inner_stop = stop if stop == numel else max(stop // UNIT * UNIT, inner_start)
    slices = []
    if start < inner_start:
        begin = start // UNIT * UNIT
        slices.append(ParamSlice(param, start, inner_start, begin, min(begin + UNIT, numel)))
    step = max_numel or max(inner_stop - inner_start, 1)
    for at in range(inner_start, inner_stop, step):
        end = min(at + step, inner_stop)
        slices.append(ParamSlice(param, at, end, at, end))
    if inner_stop < stop:
        slices.append(ParamSlice(param, inner_stop, stop, inner_stop, min(inner_stop + UNIT, numel)))
    return slices


def slices_of(bucket: Bucket, world: int, rank: int, max_numel: int | None = None) -> tuple[ParamSlice, ...]:
    """What `rank` owns of a bucket, in the order of the bucket, no slice larger than `max_numel` elements."""
    if max_numel is not None and (max_numel <= 0 or max_numel % UNIT):
        raise PlanError(f"the largest slice must be a positive multiple of {UNIT} elements, got {max_numel}.")
    numel_of = {slot.param: slot.numel for slot in bucket.slots}
    slices: list[ParamSlice] = []
    for param, owned in _ranges(bucket, world):
        if owned.rank == rank:
            slices += _cut(param, numel_of[param], owned.start, owned.stop, max_numel)
    return tuple(slices)


def element_ownership(plan: BucketPlan, world: int) -> Ownership:
    """Who owns what when every bucket of `plan` is cut into equal shards."""
    of: list[list[OwnedRange]] = [[] for _ in plan.specs]
    for bucket in plan.buckets:
        for param, owned in _ranges(bucket, world):
            of[param].append(owned)
    return tuple(tuple(ranges) for ranges in of)


def parameter_ownership(numels: Sequence[int], owners: Sequence[int]) -> Ownership:
    """Who owns what when each parameter belongs to one rank."""
    return tuple((OwnedRange(0, numel, rank),) for numel, rank in zip(numels, owners, strict=True))


def greedy_owners(numels: Sequence[int], world: int) -> tuple[int, ...]:
    """A rank for each parameter: the largest first, each to the rank with the least; ties to the lower number."""
    loads = [0] * world
    owners = [0] * len(numels)
    # Ties by number: every rank computes this by itself, and all must come to the same.
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += numels[index]
    return tuple(owners)


def loads_of(ownership: Ownership, world: int) -> tuple[int, ...]:
    """How many elements each rank owns."""
    loads = [0] * world
    for ranges in ownership:
        for owned in ranges:
            loads[owned.rank] += owned.stop - owned.start
    return tuple(loads)


def reslice(old: Ownership, new: Ownership) -> tuple[Move, ...]:
    """Every element's way from its old owner to its new one, whatever the partitions and numbers of ranks.

    Moves from a rank to itself are included: together the moves cover every element exactly once.
    """
    if len(old) != len(new):
        raise PlanError(f"cannot re-slice {len(old)} parameters into {len(new)}. Give the same parameters.")
    moves: list[Move] = []
    for param, (before, after) in enumerate(zip(old, new, strict=True)):
        if before[-1].stop != after[-1].stop:
            raise PlanError(
                f"parameter {param} has {before[-1].stop} elements in one partition and {after[-1].stop} in the "
                "other. Give partitions of the same parameters."
            )
        i = j = 0
        while i < len(before) and j < len(after):
            source, target = before[i], after[j]
            start, stop = max(source.start, target.start), min(source.stop, target.stop)
            moves.append(Move(param, start, stop, source.rank, target.rank))
            # Whichever ends here is used up; both, where the two partitions are cut at the same place.
            i += source.stop == stop
            j += target.stop == stop
    return tuple(moves)
