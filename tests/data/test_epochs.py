"""What would go wrong from one epoch, loop or process to the next without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

import phalanx
from phalanx.data.loader import Loader
from phalanx.errors import StateError
from tests.cluster import run_ranks
from tests.data.test_loader import Numbers, lists, make

pytestmark = pytest.mark.timeout(90)


def test_two_loops_at_once_are_refused() -> None:
    """Each would take up what the other has left, and samples would be left out."""
    loader = make(0, 1, DataLoader(Numbers(6), 1))
    with pytest.raises(StateError, match="rank 0: a loop over this loader goes on after another one"):
        for _ in loader:
            assert lists(loader) == [[0], [1], [2], [3], [4], [5]]
    kept = iter(loader)
    next(kept)
    assert len(lists(loader)) == 6
    with pytest.raises(StateError, match="one at a time"):
        next(kept)
    assert len(lists(loader)) == 6, "a loop after that is whole"


def test_a_batch_sampler_in_the_samplers_place_counts_its_samples() -> None:
    """As torch's documentation shows it for datasets that load a list of samples at once."""
    given = DataLoader(Lists(7), sampler=BatchSampler(RandomSampler(range(7)), 3, False), batch_size=None)
    loader = make(0, 1, given)
    assert len(loader) == 3 and [loader.count for _ in loader] == [3, 3, 1]
    assert sorted(one for batch in lists(loader) for one in batch) == list(range(7))


class Lists(Numbers):
    """Loads a list of samples at once."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


def test_the_sampler_inside_a_batch_sampler_of_ones_own_hears_of_the_epoch() -> None:
    sampler = DistributedSampler(Numbers(32), 1, 0, shuffle=True)
    loader = make(0, 1, DataLoader(Numbers(32), batch_sampler=BatchSampler(sampler, 8, False)), sharded=True)
    assert lists(loader) != lists(loader) and sampler.epoch == 1


class Doubling(DataLoader[Any]):
    """A DataLoader that does something to the batches on their way."""

    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_a_dataloader_that_iterates_in_its_own_way_is_not_left_out_in_silence() -> None:
    given = Doubling(Numbers(4), 2)
    with pytest.warns(UserWarning, match="rank 0: the DataLoader is a Doubling, whose own way to iterate is not used"):
        make(0, 1, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lists(make(0, 1, given, sharded=True)) == [[0, 2], [4, 6]]


class ByNumpy(Sampler[int]):
    """A sampler whose generator is one of numpy's."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(6).tolist())


def test_a_sampler_may_hold_a_generator_of_another_kind() -> None:
    sampler = ByNumpy()
    loader = make(0, 1, DataLoader(Numbers(6), 6, sampler=sampler))
    assert sorted(lists(loader)[0]) == list(range(6))
    assert isinstance(sampler.generator, np.random.Generator)


class ByEpoch(IterableDataset[int]):
    """A stream whose order is another one in every epoch: told by set_epoch, or drawn from its process's numbers."""

    def __init__(self, told: bool) -> None:
        self.told, self.epoch = told, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch) if self.told else None
        return iter(torch.randperm(16, generator=generator).tolist())


@pytest.mark.parametrize("told", [True, False])
def test_processes_that_would_not_hear_of_the_next_epoch_are_started_anew(told: bool) -> None:
    def loader() -> Loader:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="rank 0: the DataLoader's processes .* would not hear of the next epoch"):
            return make(0, 1, DataLoader(ByEpoch(told), 4, num_workers=1, persistent_workers=True))

    whole, resumed = loader(), loader()
    epochs = [lists(whole) for _ in range(2)]
    assert epochs[0] != epochs[1]
    resumed.set_epoch(1)
    assert lists(resumed) == epochs[1]


class Halves(IterableDataset[int]):
    """A stream of which the first of two processes reads five samples, the second eight."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None and info.num_workers == 2
        return iter(range(5) if info.id == 0 else range(10, 18))


def weights_of_halves(rank: int, world: int) -> list[tuple[int, float]]:
    model = phalanx.DistributedDataParallel(nn.Linear(1, 1))
    weights: list[float] = []
    real = model.weight
    model.weight = lambda weight: (weights.append(weight), real(weight))[1]  # type: ignore[method-assign]
    given = DataLoader(Halves(), 2, num_workers=2, multiprocessing_context="fork")
    loader = make(rank, world, given, model=model, uneven="join")
    found = []
    for batch in loader:
        found.append((len(batch), weights[-1] if weights else 0.0))
    return found


def test_batches_of_a_stream_that_do_not_meet_their_like_count_by_their_samples() -> None:
    """Rank 0 has one sample of the first process's rest, while rank 1 has two of the second's, in the same step."""
    first, second = run_ranks(2, weights_of_halves)
    assert [size for size, _ in first] == [2, 2, 1, 2] and [size for size, _ in second] == [2, 2, 2]
    assert all(weight == size for size, weight in first + second)


class Span(IterableDataset[int]):
    """The stream of torch's documentation, of which a worker_init_fn gives each process a part."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def take_a_part(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    size = (info.dataset.end - info.dataset.start) // info.num_workers
    info.dataset.start += number * size
    info.dataset.end = info.dataset.start + size


def test_a_part_of_the_stream_that_worker_init_fn_sets_is_what_the_process_reads() -> None:
    given = DataLoader(Span(0, 8), 2, num_workers=2, worker_init_fn=take_a_part, multiprocessing_context="fork")
    assert sorted(one for batch in lists(make(0, 1, given)) for one in batch) == list(range(8))
