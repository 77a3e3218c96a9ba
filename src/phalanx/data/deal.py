"""Which part of an epoch each rank gets, batch by batch. Pure.

The epoch is one order of units (samples, or ready-made batches), the same on every rank. It is cut into global batches,
and each of those into one share per rank, as even as possible:

    10 units, global batches of 4, two ranks     [0 1|2 3] [4 5|6 7] [8|9]
    9 units, global batches of 4, two ranks      [0 1|2 3] [4 5|6 7] [8|]      rank 1 has nothing in the last one

Together the ranks take exactly what one process with the global batch size would take, in the same steps; so a run may
go on, in the middle of an epoch, on another number of ranks.

A model may refuse a batch of one sample (BatchNorm). Which rest an epoch ends with changes with the number of ranks, so that
a run may meet one that it did not begin with. For such a model nobody gets fewer than `least` units, or none at all:

    11 units, global batches of 4, two ranks     [0 1|2 3] [4 5|6 7] [8 9 10|]
    9 units, the same                            [0 1|2 3] [4 5 6|7 8]           no step has less either
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one global batch, as positions in the epoch's order."""

    start: int
    stop: int
    end: int
    """Where the global batch ends: what all ranks have used after it."""
    is_even: bool
    """Whether every rank's part of this global batch has the same size."""

    def __len__(self) -> int:
        return self.stop - self.start


def even_part(begin: int, end: int, rank: int, world: int) -> tuple[int, int]:
    """The part of `rank` when `begin:end` is divided among `world`; sizes differ by one at most, earlier ranks first."""
    size, more = divmod(end - begin, world)
    start = begin + rank * size + min(rank, more)
    return start, start + size + (rank < more)


def num_parts(size: int, world: int, least: int) -> int:
    """Among how many ranks a global batch of `size` units is divided."""
    return max(1, min(world, size // least))


def deal(
    first: int, total: int, global_batch: int, rank: int, world: int, drop_last: bool = False, least: int = 1
) -> Iterator[Share]:
    """The shares of `rank` in the units from `first` on. With `drop_last` an incomplete global batch is left out."""
    begin = first
    while begin < total:
        end = min(begin + global_batch, total)
        if drop_last and end - begin < global_batch:
            return
        if not drop_last and total - end < least:
            end = total
        parts = num_parts(end - begin, world, least)
        start, stop = even_part(begin, end, rank, parts) if rank < parts else (end, end)
        yield Share(start, stop, end, parts == world and (end - begin) % world == 0)
        begin = end


def num_shares(
    total: int, global_batch: int, rank: int, world: int, drop_last: bool, with_empty: bool, least: int = 1
) -> int:
    """How many shares of a whole epoch `rank` trains on; without the empty one where it stops early instead."""
    whole, rest = divmod(total, global_batch)
    last = 0 if drop_last else rest
    if whole and 0 < last < least:
        whole, last = whole - 1, global_batch + last
    shares = [(whole, global_batch), (1 if last else 0, last)]
    # Earlier ranks first.
    return sum(count for count, size in shares if with_empty or rank < num_parts(size, world, least))
