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

_NOT_THE_STREAMS = ("__", "_StreamPart__")


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
        # Mangled, as all other names are the stream's.
        self.__stream = stream
        self.__place = (rank, world)
        self.__global_batch = global_batch
        self.__ending = ending

    def __iter__(self) -> Iterator[Dealt]:
        waiting: list[Any] = []
        last: list[Any] = []
        for sample in self.__stream:
            waiting.append(sample)
            if len(waiting) == self.__global_batch:
                start, stop = even_part(0, len(waiting), *self.__place)
                last = waiting[start:stop]
                waiting = []
                yield from map(Dealt, last)
        if waiting and self.__ending != "drop":
            yield from self.__rest(waiting, last)

    def __rest(self, waiting: list[Any], last: list[Any]) -> Iterator[Dealt]:
        world = self.__place[1]
        start, stop = even_part(0, len(waiting), *self.__place)
        is_even = len(waiting) % world == 0
        for sample in waiting[start:stop]:
            yield Dealt(sample, True, is_even)
        if start == stop and self.__ending == "weight":
            # As many as ever: layers that look at the whole batch, such as BatchNorm, refuse a batch of one.
            for sample in last or waiting:
                yield Dealt(sample, False, is_even)

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn finds the user's own attributes where it always did.
        if name.startswith(_NOT_THE_STREAMS):
            raise AttributeError(name)
        return getattr(self.__stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # And sets them there. One that gives each process its part (dataset.start = …) would else give it to nobody,
        # and every process read the whole stream.
        if name.startswith(_NOT_THE_STREAMS):
            super().__setattr__(name, value)
        else:
            setattr(self.__stream, name, value)


class CollateDealt:
    """The user's collate function around dealt samples; what it makes is passed on with its count."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, dealt: Any) -> Collated:
        if isinstance(dealt, Dealt):  # batch_size=None: the dataset makes batches itself
            return Collated(self._collate(dealt.value), int(dealt.counts), dealt.is_even)
        values = [one.value for one in dealt]
        return Collated(self._collate(values), sum(one.counts for one in dealt), all(one.is_even for one in dealt))
