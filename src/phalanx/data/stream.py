"""A rank's part of an iterable dataset that every rank can read whole.

Runs inside the DataLoader, maybe in processes of its own, so everything here can be pickled and knows no process group. Each
rank reads the stream (or, with several DataLoader processes, each of them the part that the dataset gives it) and keeps
its share of every global batch; reading the same, all ranks know without a word where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from .deal import even_part


@dataclass(frozen=True, slots=True)
class Dealt:
    """One sample on its way from the stream to the batch that it becomes part of."""

    value: Any
    counts: bool = True
    """False for what stands in where this rank has nothing left."""
    is_even: bool = True


@dataclass(frozen=True, slots=True)
class Collated:
    """A batch, and how many samples of this rank are in it."""

    value: Any
    num_samples: int
    is_even: bool


class StreamPart(IterableDataset[Dealt]):
    """The share of `rank` in every `global_batch` samples of `stream`.

    At the end, where a global batch is incomplete, it is divided evenly; a rank that gets nothing of it repeats its last
    share with `fill`, marked as not counting, and stops without.
    """

    def __init__(self, stream: Iterable[Any], rank: int, world: int, global_batch: int, ending: str) -> None:
        self.stream = stream
        self._place = (rank, world)
        self._global_batch = global_batch
        self._ending = ending

    def __iter__(self) -> Iterator[Dealt]:
        waiting: list[Any] = []
        last: list[Any] = []
        for sample in self.stream:
            waiting.append(sample)
            if len(waiting) == self._global_batch:
                start, stop = even_part(0, len(waiting), *self._place)
                last = waiting[start:stop]
                waiting = []
                yield from map(Dealt, last)
        if waiting and self._ending != "drop":
            yield from self._rest(waiting, last)

    def _rest(self, waiting: list[Any], last: list[Any]) -> Iterator[Dealt]:
        world = self._place[1]
        start, stop = even_part(0, len(waiting), *self._place)
        is_even = len(waiting) % world == 0
        for sample in waiting[start:stop]:
            yield Dealt(sample, True, is_even)
        if start == stop and self._ending == "weight":
            # As many as ever: layers that look at the whole batch, such as BatchNorm, refuse a batch of one.
            for sample in last or waiting:
                yield Dealt(sample, False, is_even)

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn finds the user's own attributes where it always did.
        if name.startswith("__") or name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)


class CollateDealt:
    """The user's collate function around dealt samples; what it makes is passed on with its count."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, dealt: Any) -> Collated:
        if isinstance(dealt, Dealt):  # batch_size=None: the dataset makes batches itself
            return Collated(self._collate(dealt.value), int(dealt.counts), dealt.is_even)
        values = [one.value for one in dealt]
        return Collated(self._collate(values), sum(one.counts for one in dealt), all(one.is_even for one in dealt))
