"""Who writes which elements, and who reads them from where. Worked example: tensors of 6 and 2 elements, three ranks.

    bytes   |a a a a a a|b b|          each rank writes a third of what all ranks hold alike
    rank    |0 0 0 1 1 1|2 2|          cuts fall on multiples of a grain of elements (here 3), never inside one

Reading is the inverse: `cover` finds which of the extents that were saved hold elements [start, stop), however many
ranks saved them and however many read. Pure: no process group, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Cuts fall on multiples of this many elements, so that extents begin at whole cache lines and few tensors are cut.
GRAIN = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of tensor number `index`."""

    index: int
    start: int
    stop: int


def share(sizes: Sequence[tuple[int, int]], rank: int, world: int, grain: int = GRAIN) -> list[Part]:
    """What `rank` writes of tensors that all ranks hold alike; `sizes` are their elements and bytes per element."""
    total = sum(numel * itemsize for numel, itemsize in sizes)
    first, last = (total * rank // world, total * (rank + 1) // world)
    found, at = [], 0
    for index, (numel, itemsize) in enumerate(sizes):
        # Both neighbours of a cut compute it from the same numbers, so that nothing is written twice or left out.
        start = _cut(first - at, numel, itemsize, grain)
        stop = numel if rank == world - 1 else _cut(last - at, numel, itemsize, grain)
        if start < stop or (numel == 0 and rank == 0):
            found.append(Part(index, start, stop))
        at += numel * itemsize
    return found


def _cut(num_bytes: int, numel: int, itemsize: int, grain: int) -> int:
    elements = max(0, num_bytes) // itemsize
    return numel if elements >= numel else elements // grain * grain


@dataclass(frozen=True, slots=True)
class Held:
    """Elements [start, stop) of a tensor, at byte `offset` of the file of `rank`."""

    start: int
    stop: int
    rank: int
    offset: int


def cover(held: Sequence[Held], start: int, stop: int, itemsize: int) -> Iterator[Held]:
    """The places of elements [start, stop), in order; neighbours in a file come as one. Raises LookupError at a gap.

    `held` is sorted by `start`. Elements that were saved twice are taken from the first that has them.
    """
    run: Held | None = None
    at = start
    for one in held:
        if one.stop <= at or at >= stop:
            continue
        if one.start > at:
            break
        end = min(one.stop, stop)
        part = Held(at, end, one.rank, one.offset + (at - one.start) * itemsize)
        if run is not None and run.rank == part.rank and run.offset + (run.stop - run.start) * itemsize == part.offset:
            run = Held(run.start, part.stop, run.rank, run.offset)
        else:
            if run is not None:
                yield run
            run = part
        at = end
    if run is not None:
        yield run
    if at < stop:
        raise LookupError(f"elements {at} to {stop}")


def renamed(name: str, mapping: dict[str, str]) -> str:
    """`name` with its longest leading part that `mapping` has replaced: {"enc": "body"} makes enc.0.weight body.0.weight."""
    for old in sorted(mapping, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return (mapping[old] + name[len(old) :]).removeprefix(".")
    return name
