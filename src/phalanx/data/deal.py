"""Which part of an epoch each rank gets, batch by batch. Pure.

The epoch is one order of units (samples, or ready-made batches), the same on every rank. It is cut into global batches,
and each of those into one share per rank, as even as possible:

    10 units, global batches of 4, two ranks     [0 1|2 3] [4 5|6 7] [8|9]
    9 units, global batches of 4, two ranks      [0 1|2 3] [4 5|6 7] [8|]      rank 1 has nothing in the last one

Together the ranks take exactly what one process with the global batch size would take, in the same steps; so a run may
go on, in the middle of an epoch, on another number of ranks.
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


def deal(first: int, total: int, global_batch: int, rank: int, world: int, drop_last: bool = False) -> Iterator[Share]:
    """The shares of `rank` in the units from `first` on. With `drop_last` an incomplete global batch is left out."""
    for begin in range(first, total, global_batch):
        end = min(begin + global_batch, total)
        if drop_last and end - begin < global_batch:
            return
        start, stop = even_part(begin, end, rank, world)
        yield Share(start, stop, end, (end - begin) % world == 0)


def num_shares(total: int, global_batch: int, rank: int, world: int, drop_last: bool, with_empty: bool) -> int:
    """How many shares of a whole epoch `rank` trains on; without the empty one where it stops early instead."""
    whole, rest = divmod(total, global_batch)
    shares = [(whole, global_batch), (0 if rest == 0 or drop_last else 1, rest)]
    # Earlier ranks first: a rank has a part of a batch if the batch has more units than there are ranks before it.
    return sum(count for count, size in shares if with_empty or size > rank)
