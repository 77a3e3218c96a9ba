"""Where a rank's batches come from: samples dealt out, ready-made batches dealt out, a stream, or the rank's own data.

    Samples   a map-style dataset with a sampler         position counted in samples; resumes on any number of ranks
    Batches   a map-style dataset with a batch sampler   position counted in batches; resumes on any number of ranks
    Stream    an iterable dataset                        position counted in steps; resumes by reading on, on as many ranks
    Own       whatever the rank has, not dealt out       as Stream; one small collective per step says who is out of data

A source makes the DataLoader once, with the user's own settings, and one iterator per epoch. It knows nothing of models.
"""

from __future__ import annotations

import abc
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ..errors import ConfigError
from .deal import Share, deal, num_shares
from .order import EpochOrder, epoch_seed, initial_seed, set_epoch
from .secluded import Secluded
from .stream import Collated, CollateDealt, StreamPart
from .values import Exchange

# What of a DataLoader does not depend on which samples it loads.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of this rank. `num_samples` is 0 for a stand-in, which must not count."""

    value: Any
    num_samples: int
    position: int
    """How far the whole world is in the epoch after this batch, in the source's own unit."""
    is_even: bool
    """Whether every rank's batch of this step has the same number of samples."""


@dataclass(frozen=True)
class Settings:
    """How a source deals; the same on every rank."""

    ending: str
    """What becomes of an uneven end: "weight", "join" or "drop"."""
    split_batches: bool = False
    least: int = 1
    """No rank gets fewer samples in a step, unless it gets none: 2 for a model that refuses a batch of one."""


class Source(abc.ABC):
    """Makes the batches of one rank, epoch by epoch."""

    unit: str
    """In what `Batch.position` counts; part of a saved state."""
    any_world = False
    """Whether a position means the same on another number of ranks."""
    steps_differ = False
    """Whether the ranks' batches of one step may be of different global batches, so that one cannot say if all are even."""
    _remedy = "So they are started anew for each. "

    def __init__(self, given: DataLoader[Any], exchange: Exchange, settings: Settings) -> None:
        self._given, self._exchange, self._settings = given, exchange, settings
        # For the seeds of the DataLoader's processes: without it they would come from torch's own random numbers.
        self._generator = torch.Generator()
        samplers = (given.sampler, getattr(given.batch_sampler, "sampler", None))
        generators = [getattr(sampler, "generator", None) for sampler in samplers]
        said = exchange.all_objects((initial_seed(*generators, given.generator), self._steps_of(given)))
        self.seeds: list[int] = [seed for seed, _ in said]
        """Where each rank's random numbers start. Rank 0's is everybody's, except for data of each rank's own."""
        self.steps: list[list[Any]] = [steps for _, steps in said]
        """Of each rank, what a position in steps depends on: batch size and processes. Empty for other positions."""

    def _steps_of(self, given: DataLoader[Any]) -> list[Any]:
        return []

    @abc.abstractmethod
    def __len__(self) -> int:
        """Batches of this rank in a whole epoch. TypeError where nobody can know."""

    @abc.abstractmethod
    def epoch(self, number: int, position: int, digest: str) -> Iterator[Batch]:
        """The batches of an epoch after `position`. `digest` is that of the order when the position was noted, or ""."""

    def is_over(self, position: int) -> bool:
        """Whether an epoch has nothing after `position`, as far as is known without reading on."""
        return False

    def hazard(self) -> str:
        """What is wrong with every epoch, in words."""
        return ""

    @property
    def seed(self) -> int:
        """Where the random numbers of all ranks start."""
        return self.seeds[0]

    @property
    def digest(self) -> str:
        """Of the order under way; "" where a source has no order of its own."""
        return ""

    @property
    def bypass(self) -> str:
        """What the user's DataLoader does in its own way to iterate, and nobody calls here, in words."""
        own = type(self._given)
        if own.__iter__ is DataLoader.__iter__ and own._get_iterator is DataLoader._get_iterator:
            return ""
        return (
            f"the DataLoader is a {own.__name__}, whose own way to iterate is not used: batches come from one of torch's "
            "with its settings. What it does to them belongs into collate_fn or the dataset, or pass sharded=True to keep "
            "it."
        )

    @property
    def staleness(self) -> str:
        """What processes that outlive the epoch would get wrong, in words; "" where they do no harm."""
        if not _outlives_epochs(self._given):
            return ""
        return (
            "the DataLoader's processes (persistent_workers=True) would not hear of the next epoch: their copies of the "
            "dataset get no set_epoch, and a stream draws on from the numbers of the epoch before, unlike a resumed run. "
            f"{self._remedy}Leave persistent_workers out."
        )

    def _again(self, **changes: Any) -> DataLoader[Any]:
        kept = {name: getattr(self._given, name) for name in _KEPT}
        kept["persistent_workers"] = kept["persistent_workers"] and not _outlives_epochs(self._given)
        return DataLoader(generator=self._generator, **{**kept, **changes})

    def _begin(self, epoch: int, rank: int) -> None:
        self._generator.manual_seed(epoch_seed(self.seed, epoch, rank))
        set_epoch(epoch, self._given.dataset)


class _Planned:
    """The batch sampler of a DataLoader that outlives the epoch: what it yields is set before each."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class _Dealt(Source):
    """The part that map-style sources share: an order, drawn per epoch and dealt out."""

    any_world = True

    def __init__(
        self, given: DataLoader[Any], exchange: Exchange, settings: Settings, sampler: Any, global_batch: int
    ) -> None:
        super().__init__(given, exchange, settings)
        if not getattr(given, "in_order", True):
            raise ConfigError(
                "a DataLoader with in_order=False does not say which samples a batch is made of, so nobody could resume. "
                "Leave in_order at its default."
            )
        self._order = EpochOrder(sampler, exchange)
        self._global_batch = global_batch
        self._drop = settings.ending == "drop" or bool(given.drop_last)
        self._least = 1  # in units; those of other sources than `Samples` are whole batches
        self._planned = _Planned()
        self._loader = self._again(dataset=given.dataset, batch_sampler=self._planned)

    def __len__(self) -> int:
        rank, world = self._exchange.rank, self._exchange.world
        fills = self._settings.ending == "weight"
        return num_shares(len(self._order), self._global_batch, rank, world, self._drop, fills, self._least)

    @property
    def digest(self) -> str:
        return self._order.digest

    def is_over(self, position: int) -> bool:
        # As long as it was drawn: what a sampler says about its length may be an estimate, or nothing.
        return next(self._deal(position, self._order.total), None) is None

    def epoch(self, number: int, position: int, digest: str) -> Iterator[Batch]:
        self._begin(number, self._exchange.rank)
        order = self._order.draw(self.seed, number, digest, position)
        shares = list(self._deal(position, len(order)))
        if self._settings.ending != "weight":
            shares = [share for share in shares if len(share)]
        self._planned.batches = (self._indices(order, share) for share in shares)
        for value, share in zip(self._loader, shares, strict=True):
            yield Batch(value, self._num_samples(order, share), share.end, share.is_even)

    def _deal(self, position: int, total: int) -> Iterator[Share]:
        rank, world = self._exchange.rank, self._exchange.world
        return deal(position, total, self._global_batch, rank, world, self._drop, self._least)

    def _stand_in(self, share: Share) -> Share:
        """What a rank without samples loads: the last ones, as many as ever.

        Not one sample alone: layers that look at the whole batch, such as BatchNorm, refuse a batch of one.
        """
        size = max(self._least, self._global_batch // self._exchange.world)
        return Share(max(0, share.start - size), share.start, share.end, False)

    @abc.abstractmethod
    def _indices(self, order: Sequence[Any], share: Share) -> Any: ...

    @abc.abstractmethod
    def _num_samples(self, order: Sequence[Any], share: Share) -> int: ...


class Samples(_Dealt):
    """Samples of a map-style dataset. A batch is of the user's size on each rank, or divided (`split_batches`)."""

    unit = "samples"

    def __init__(self, given: DataLoader[Any], exchange: Exchange, settings: Settings) -> None:
        # A loader without batching (batch_size=None) gives single samples, one per rank and step.
        size = given.batch_size or 1
        global_batch = size if settings.split_batches else size * exchange.world
        super().__init__(given, exchange, settings, given.sampler, global_batch)
        self._least = min(settings.least, size)  # batches of one by choice are not our business
        if given.batch_size is None:
            self._loader = self._again(dataset=given.dataset, batch_size=None, sampler=self._planned)

    def hazard(self) -> str:
        try:
            total, world = len(self._order), self._exchange.world
        except TypeError:
            return ""  # a sampler that does not know how long it is
        rest = total % self._global_batch
        if total and rest == total and self._drop:
            return (
                f"an epoch has no step at all: {total} samples are fewer than the {self._global_batch} of one step over "
                f"{world} ranks, and an incomplete step is left out. Use smaller batches, or leave out drop_last and "
                "uneven='drop'."
            )
        return ""

    def _indices(self, order: Sequence[Any], share: Share) -> Any:
        chosen = share if len(share) else self._stand_in(share)
        found = list(order[chosen.start : chosen.stop])
        return found if self._given.batch_size is not None else found[0]

    def _num_samples(self, order: Sequence[Any], share: Share) -> int:
        return len(share)


class Batches(_Dealt):
    """Batches of the user's own batch sampler, one per rank and step; also where the dataset itself puts them together."""

    unit = "batches"

    def __init__(self, given: DataLoader[Any], exchange: Exchange, settings: Settings) -> None:
        super().__init__(given, exchange, settings, _batch_sampler(given), exchange.world)
        if given.batch_sampler is None:
            self._loader = self._again(dataset=given.dataset, batch_size=None, sampler=self._planned)

    def _indices(self, order: Sequence[Any], share: Share) -> Any:
        return order[(share if len(share) else self._stand_in(share)).start]  # a stand-in is the batch before

    def _num_samples(self, order: Sequence[Any], share: Share) -> int:
        return len(order[share.start]) if len(share) else 0

    def epoch(self, number: int, position: int, digest: str) -> Iterator[Batch]:
        for batch in super().epoch(number, position, digest):
            # Batches may be of any size: only their numbers tell whether they are the same, so they always count.
            yield Batch(batch.value, batch.num_samples, batch.position, False)


class Stream(Source):
    """An iterable dataset that every rank reads whole, keeping its part."""

    unit = "steps"

    def __init__(self, given: DataLoader[Any], exchange: Exchange, settings: Settings) -> None:
        super().__init__(given, exchange, settings)
        size = given.batch_size or 1
        if settings.split_batches and size % exchange.world:
            raise ConfigError(
                f"a stream in batches of {size} cannot be split over {exchange.world} ranks. Choose a multiple as the batch "
                "size, or give every rank batches of the full size (split_batches=False)."
            )
        self._size = size // exchange.world if settings.split_batches else size
        ending = "drop" if given.drop_last else settings.ending
        # Each process of the DataLoader deals out a stream of its own. A rank that gets nothing of one's rest goes on with
        # the next one's batch, while others still have theirs of the rest.
        self.steps_differ = ending == "join" and given.num_workers > 1
        stream: Any = given.dataset
        part = StreamPart(stream, exchange.rank, exchange.world, self._size * exchange.world, ending)
        self._loader = self._again(
            dataset=part,
            batch_size=None if given.batch_size is None else self._size,
            collate_fn=CollateDealt(given.collate_fn),
        )

    def _steps_of(self, given: DataLoader[Any]) -> list[Any]:
        size, num_readers = _steps_of(given)
        return [size // self._exchange.world if size and self._settings.split_batches else size, num_readers]

    def __len__(self) -> int:
        total = len(self._given.dataset)  # type: ignore[arg-type]  # TypeError for a stream without a length, as torch's
        rank, world, ending = self._exchange.rank, self._exchange.world, self._settings.ending
        drops = ending == "drop" or bool(self._given.drop_last)
        return num_shares(total, self._size * world, rank, world, drops, ending == "weight")

    def epoch(self, number: int, position: int, digest: str) -> Iterator[Batch]:
        # The same on every rank, for a stream that shuffles with the seed of its DataLoader process.
        self._begin(number, 0)
        found: Collated
        batches = Secluded(self._loader, epoch_seed(self.seed, number))
        for step, found in itertools.islice(enumerate(batches, 1), position, None):
            yield Batch(found.value, found.num_samples, step, found.is_even)


class Own(Source):
    """The user's DataLoader as it is: every rank has samples of its own, maybe more or fewer than others."""

    unit = "own steps"
    _remedy = ""  # the DataLoader is the user's own
    bypass = ""

    def _steps_of(self, given: DataLoader[Any]) -> list[Any]:
        return _steps_of(given)

    def __len__(self) -> int:
        return len(self._given)

    def epoch(self, number: int, position: int, digest: str) -> Iterator[Batch]:
        given = self._given
        parts = [given, given.sampler, given.batch_sampler, getattr(given.batch_sampler, "sampler", None)]
        set_epoch(number, given.dataset, *parts[1:])
        # By this rank's own seed: samplers that divide one dataset draw alike where the script has seeded ranks alike.
        mine = Secluded(given, epoch_seed(self.seeds[self._exchange.rank], number), parts)
        # A rank that was out of batches already stands in with its last one.
        last = list(deque(itertools.islice(mine, position), maxlen=1))
        if self._settings.ending == "join":
            for step, value in enumerate(mine, position + 1):
                yield Batch(value, _length(value), step, False)
        else:
            yield from self._together(mine, last, position)

    def _together(self, mine: Iterator[Any], last: list[Any], position: int) -> Iterator[Batch]:
        """Go on until the last rank is out of batches (weight), or until the first is (drop)."""
        for step in itertools.count(position + 1):
            found = list(itertools.islice(mine, 1))
            left = self._exchange.number_with(bool(found))
            if left == 0 or (left < self._exchange.world and self._settings.ending == "drop"):
                return
            if not found and not last:
                raise ConfigError(
                    f"rank {self._exchange.rank} has no batch at all, while others have: there is nothing to stand in for "
                    "the batches it lacks. Give every rank one or more."
                )
            last = found or last
            yield Batch(last[0], _length(last[0]) if found else 0, step, False)


def _steps_of(given: DataLoader[Any]) -> list[Any]:
    """Batch size and processes: with others the same number of steps is another place in the data."""
    size = given.batch_size or getattr(given.batch_sampler, "batch_size", None)
    # Several processes take turns, batch by batch, each with a stream of its own. One reads as this one would.
    num_readers = max(1, given.num_workers) if isinstance(given.dataset, IterableDataset) else 1
    return [size if type(size) is int else None, num_readers]


def _length(value: Any) -> int:
    """Samples in a batch: the length of the first tensor in it, or 1."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 1
    items = list(value.values()) if isinstance(value, dict) else value
    return _length(items[0]) if isinstance(items, (list, tuple)) and items else 1


def kind_of(given: DataLoader[Any], sharded: bool) -> type[Source]:
    """Which source fits a DataLoader."""
    if sharded:
        return Own
    if isinstance(given.dataset, IterableDataset):
        return Stream
    # A DataLoader that was given a batch sampler forgets its batch size.
    return Batches if given.batch_size is None and _batch_sampler(given) is not None else Samples


def _batch_sampler(given: DataLoader[Any]) -> Any:
    """The user's; without batching (batch_size=None) it may stand in the sampler's place."""
    if given.batch_sampler is None and isinstance(given.sampler, BatchSampler):
        return given.sampler
    return given.batch_sampler


def _outlives_epochs(given: DataLoader[Any]) -> bool:
    """Whether the DataLoader's processes live on from epoch to epoch, with a dataset that changes between them."""
    return given.persistent_workers and (isinstance(given.dataset, IterableDataset) or hasattr(given.dataset, "set_epoch"))


def _is_divided(given: DataLoader[Any]) -> bool:
    """Whether a sampler gives each rank a part of its own: torch's does, and those that have `num_replicas` as it does."""
    outer = (given.sampler, given.batch_sampler)
    samplers = [*outer, *(getattr(one, "sampler", None) for one in outer)]
    return any(isinstance(one, DistributedSampler) or getattr(one, "num_replicas", 1) > 1 for one in samplers)


def source_of(given: DataLoader[Any], exchange: Exchange, settings: Settings, sharded: bool) -> Source:
    """The source that fits a DataLoader."""
    kind = kind_of(given, sharded)
    if not sharded and kind is not Stream and _is_divided(given):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, or one like it, and is divided already. Leave the sampler out "
            "(shuffle=True does the same here, and nothing is repeated at the end), or pass sharded=True to keep it."
        )
    if kind is Batches and settings.split_batches:
        raise ConfigError("batches of a batch sampler are not split. Leave split_batches out, or let it make smaller ones.")
    return kind(given, exchange, settings)
