"""A DataLoader on several ranks: what each gets, how it counts, and how a run goes on in the middle of an epoch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import phalanx
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from phalanx.errors import ArgumentTypeError, ConfigError, MismatchError, StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(90)

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    """0, 1, 2, … as samples."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same as a stream; several processes of a DataLoader divide it by their number."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.total, step))


class Dice(Sampler[int]):
    """Draws from Python's own random numbers, which nobody seeds for it."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.total))
        random.SystemRandom().shuffle(order)
        return iter(order)


def make(rank: int, world: int, given: DataLoader[Any], **options: Any) -> Loader:
    return Loader(given, Exchange(rank, world, CPU), CPU, **options)


def lists(loader: Loader) -> list[list[int]]:
    """One epoch as lists of numbers."""
    with torch.no_grad():
        return [torch.as_tensor(batch).reshape(-1).tolist() for batch in loader]


def joined(results: list[list[list[int]]]) -> list[list[int]]:
    """The ranks' batches of each step put together, for as many steps as the longest rank has."""
    steps = max(map(len, results))
    return [[one for found in results for one in (found[step] if step < len(found) else [])] for step in range(steps)]


def epochs_of(rank: int, world: int, total: int, batch: int, options: dict[str, Any]) -> list[list[list[int]]]:
    torch.manual_seed(100 + rank)  # as scripts do; the order must be one all the same
    loader = make(rank, world, DataLoader(Numbers(total), batch, **options))
    drawn = torch.rand(1)
    found = [lists(loader) for _ in range(2)]
    assert len(found[0]) == len(loader) and loader.epoch == 2
    assert torch.equal(torch.rand(1), _second_number(100 + rank)), (drawn, "the script's random numbers were touched")
    return found


def _second_number(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(1, generator=generator)
    return torch.rand(1, generator=generator)


@pytest.mark.parametrize("total", [24, 25, 31])
def test_every_sample_comes_once_per_epoch_in_an_order_of_its_own(total: int) -> None:
    results = run_ranks(3, epochs_of, total, 4, {"shuffle": True})
    first, second = (joined([found[epoch] for found in results]) for epoch in range(2))
    for steps in (first, second):
        assert sorted(one for step in steps for one in step) == list(range(total))
        assert [len(step) for step in steps] == [12] * (total // 12) + ([total % 12] if total % 12 else [])
    assert first != second


def one_process(total: int, batch: int) -> list[list[int]]:
    torch.manual_seed(100)
    return lists(make(0, 1, DataLoader(Numbers(total), batch, shuffle=True)))


def test_the_ranks_take_what_one_process_would_take_in_the_same_steps() -> None:
    results = run_ranks(2, epochs_of, 25, 4, {"shuffle": True})
    assert joined([found[0] for found in results]) == one_process(25, 8)


def kinds(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    numbers = Numbers(20)
    weights = torch.ones(20)
    plans = {
        "sequential": DataLoader(numbers, 3),
        "drop_last": DataLoader(numbers, 3, drop_last=True),
        "generator": DataLoader(numbers, 3, shuffle=True, generator=torch.Generator().manual_seed(7 + rank)),
        "weighted": DataLoader(numbers, 3, sampler=WeightedRandomSampler(weights.tolist(), 20, replacement=False)),
        "own random numbers": DataLoader(numbers, 3, sampler=Dice(20)),
        "batch sampler": DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 3, False)),
        "unbatched": DataLoader(numbers, batch_size=None),
        "list of indices": DataLoader(numbers, 3, sampler=list(range(5, 20))),
        "stream": DataLoader(Stream(20), 3),
        "stream of batches": DataLoader(Stream(20), batch_size=None),
    }
    found: dict[str, Any] = {}
    for name, given in plans.items():
        loader = make(rank, world, given)
        found[name] = lists(loader)
        assert name.startswith("stream") or len(found[name]) == len(loader), name
    found["split"] = lists(make(rank, world, DataLoader(numbers, 8), split_batches=True))
    found["dropped"] = lists(make(rank, world, DataLoader(Stream(20), 3), uneven="drop"))
    return found


def test_every_kind_of_loader_is_dealt_out_without_a_loss_or_a_repeat() -> None:
    results = run_ranks(2, kinds)
    together = {name: joined([found[name] for found in results]) for name in results[0]}
    expected = {"drop_last": 18, "dropped": 18, "list of indices": 15}
    for name, steps in together.items():
        numbers = sorted(one for step in steps for one in step)
        assert len(numbers) == len(set(numbers)) == expected.get(name, 20), (name, steps)
    assert together["sequential"] == together["stream"] == [list(range(k, min(k + 6, 20))) for k in range(0, 20, 6)]
    assert together["split"] == [list(range(k, min(k + 8, 20))) for k in range(0, 20, 8)]
    assert together["unbatched"] == together["stream of batches"] == [[k, k + 1] for k in range(0, 20, 2)]


def process_kinds(rank: int, world: int, method: str) -> list[list[list[int]]]:
    found = []
    for dataset in (Numbers(23), Stream(23)):
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
        loader = make(rank, world, DataLoader(dataset, 3, **options))
        found += [lists(loader), lists(loader)]
        del loader
    return found


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_processes_that_load_may_be_started_in_any_way(method: str) -> None:
    results = run_ranks(2, process_kinds, method)
    for epoch in range(4):
        numbers = sorted(one for found in results for batch in found[epoch] for one in batch)
        assert numbers == list(range(23)), epoch


def pairs(total: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(total, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(rank: int, world: int, total: int, batch: int, uneven: str, stream: bool) -> Any:
    """Two epochs; the parameters afterwards."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if world > 1:
        model = phalanx.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = DataLoader(pairs(total), batch, shuffle=not stream)
    if stream:
        given = DataLoader(_AsStream(pairs(total)), batch)
    loader = make(rank, world, given, **({"model": model, "uneven": uneven} if world > 1 else {}))
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            steps += 1
    return steps, [parameter.detach().clone() for parameter in model.parameters()]


class _AsStream(IterableDataset[Any]):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("total", [24, 22, 19])
def test_training_on_an_uneven_epoch_is_that_of_one_process(total: int, stream: bool) -> None:
    """19 and 22 leave one and four samples for three ranks: the last step has a rank, or two, without any."""
    steps, expected = train(0, 1, total, 9, "", stream)
    for num_steps, found in run_ranks(3, train, total, 3, "weight", stream):
        assert num_steps == steps
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-13)


def join_train(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Linear(6, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make(rank, world, DataLoader(pairs(19), 3), model=model, uneven="join")
    steps = 0
    with model.join(divide_by_initial_world_size=False):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            steps += 1
    return steps, model.module.weight.detach().clone()


def test_with_join_a_rank_without_samples_stops_and_the_mean_is_still_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(pairs(19), 9):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    results = run_ranks(3, join_train)
    assert [steps for steps, _ in results] == [3, 2, 2]
    for _, weight in results:
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-12, atol=1e-13)


def count_tokens(batch: torch.Tensor) -> torch.Tensor:
    return (batch >= 0).sum()


def token_gradient(rank: int, world: int) -> Any:
    tokens = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    tokens[1, 1:] = tokens[3, 2:] = -1  # padding
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 1).double()
    if world > 1:
        model = phalanx.DistributedDataParallel(model)
    options = {"model": model, "count": count_tokens} if world > 1 else {}
    loader = make(rank, world, DataLoader(tokens, 4 // world), **options)  # type: ignore[arg-type]
    counts = []
    for batch in loader:
        real = batch[batch >= 0].reshape(-1, 1)
        model(real).square().mean().backward()
        counts.append(loader.count)
    return counts, [parameter.grad.clone() for parameter in model.parameters()]


def test_tokens_are_weighed_without_arithmetic_in_the_script() -> None:
    _, expected = token_gradient(0, 1)
    results = run_ranks(2, token_gradient)
    assert [counts for counts, _ in results] == [[4.0], [5.0]]
    for _, gradients in results:
        for mine, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-13)


def saved_after(rank: int, world: int, steps: int, stream: bool, state: Any) -> Any:
    """The batches of two epochs from `state` on, and the state after `steps` of them."""
    torch.manual_seed(50 + rank)
    dataset: Any = Stream(27) if stream else Numbers(27)
    loader = make(rank, world, DataLoader(dataset, 12 // world, shuffle=None if stream else True))
    if state is not None:
        loader.load_state_dict(state)
    found: list[Any] = []
    saved = None
    while loader.epoch < 2:
        with torch.no_grad():
            for batch in loader:
                found.append((loader.epoch, batch.tolist()))
                if len(found) == steps:
                    saved = loader.state_dict()
    return found, saved


def _both(results: list[Any]) -> list[Any]:
    """What all ranks together took in each step."""
    columns = zip(*[found for found, _ in results], strict=True)
    return [(column[0][0], [one for _, batch in column for one in batch]) for column in columns]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_run_resumes_in_the_middle_of_an_epoch_also_on_more_or_fewer_ranks(steps: int) -> None:
    whole = run_ranks(2, saved_after, steps, False, None)
    states = [saved for _, saved in whole]
    assert states[0] == states[1]
    for world in (2, 3):
        again = run_ranks(world, saved_after, 0, False, states[0])
        assert _both(again) == _both(whole)[steps:], world


def test_a_stream_resumes_on_as_many_ranks() -> None:
    whole = run_ranks(2, saved_after, 2, True, None)
    assert _both(run_ranks(2, saved_after, 0, True, whole[0][1])) == _both(whole)[2:]
    loader = make(0, 1, DataLoader(Stream(27), 12))
    with pytest.raises(StateError, match="a stream that was read on 2 ranks stands in the middle of epoch 0"):
        loader.load_state_dict(whole[0][1])


def test_states_that_do_not_fit_change_nothing() -> None:
    loader = make(0, 1, DataLoader(Numbers(10), 2, shuffle=True))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="counts samples, this loader counts steps"):
        make(0, 1, DataLoader(Stream(10), 2)).load_state_dict(state)
    with pytest.raises(StateError, match=r"no state of a loader of version 1: it lacks .*'seed'"):
        loader.load_state_dict({"version": 1})
    other = make(0, 1, DataLoader(Numbers(11), 2, shuffle=True))
    other.load_state_dict(state)
    with pytest.raises(StateError, match="the sampler drew another order for epoch 0 than before the state was saved"):
        next(iter(other))
    dice = make(0, 1, DataLoader(Numbers(30), 2, sampler=Dice(30)))
    thrown = iter(dice)
    next(thrown)
    dice.load_state_dict({**dice.state_dict(), "position": 4})
    with pytest.raises(StateError, match="draws from random numbers of its own"):
        next(iter(dice))


def test_a_loop_that_is_left_early_ends_its_epoch_and_a_number_can_be_set() -> None:
    loader = make(0, 1, DataLoader(Numbers(8), 2, shuffle=True))
    for _ in loader:
        break
    second = lists(loader)
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert lists(loader) == second and len(second) == 4


def own_parts(rank: int, world: int, uneven: str) -> Any:
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    mine = [torch.full((1,), float(10 * rank + k), dtype=torch.float64) for k in range(2 + 2 * rank)]
    loader = make(rank, world, DataLoader(mine, 2), model=model, uneven=uneven, sharded=True)  # type: ignore[arg-type]
    gradients, counts = [], []
    for batch in loader:
        model.zero_grad()
        model(batch).mean().backward()
        weight = model.module.weight.grad
        assert weight is not None
        gradients.append(weight.item())
        counts.append(loader.count)
    return gradients, counts


def test_ranks_with_data_of_their_own_go_on_until_the_last_is_out_of_it() -> None:
    results = run_ranks(2, own_parts, "weight")
    # Rank 0 has 0 and 1; rank 1 has 10, 11, 12 and 13.
    assert [gradients for gradients, _ in results] == [[pytest.approx(5.5), pytest.approx(12.5)]] * 2
    assert [counts for _, counts in results] == [[2.0, 0.0], [2.0, 2.0]]
    assert [len(gradients) for gradients, _ in run_ranks(2, own_parts, "drop")] == [1, 1]


def warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for total, options in ((9, {}), (8, {}), (9, {"uneven": "join"})):
            for _ in make(rank, world, DataLoader(Numbers(total), 4), **options):
                pass
        lists(make(rank, world, DataLoader(Numbers(9), 4)))  # under no_grad: an evaluation
    return [str(one.message) for one in said]


def test_training_on_unequal_batches_without_the_model_is_said_once() -> None:
    results = run_ranks(2, warned)
    assert [len(said) for said in results] == [1, 0]
    assert "worker.loader(loader, model), or uneven='drop'" in results[0][0]


def warned_of_the_end(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make(rank, world, DataLoader(Numbers(8), 4), uneven="drop")
        make(rank, world, DataLoader(Numbers(7), 4), uneven="drop")
    return [str(one.message) for one in said]


def test_an_epoch_without_a_step_is_said_before_it() -> None:
    (first,), second = run_ranks(2, warned_of_the_end)
    assert "an epoch has no step at all: 7 samples are fewer than the 8 of one step over 2 ranks" in first and not second


def normed(rank: int, world: int) -> list[list[float]]:
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    found = []
    # The rest of 8: one, of which nobody could train; three, of which somebody would get one; then batches of one by choice.
    for total, size in ((17, 4), (19, 4), (2, 1)):
        loader = make(rank, world, DataLoader(Numbers(total), size), model=model)
        counts = []
        model.train(size > 1)
        for x in loader:
            model(x.float().view(-1, 1)).sum().backward()
            counts.append(loader.count)
        assert len(counts) == len(loader)
        found.append(counts)
    return found


def test_nobody_gets_a_single_sample_of_an_epochs_rest_where_a_layer_refuses_it() -> None:
    assert run_ranks(2, normed) == [[[4, 5], [4, 4, 3], [1]], [[4, 4], [4, 4, 0], [1]]]


def different_loaders(rank: int, world: int) -> list[str]:
    found = []
    for given in (DataLoader(Numbers(10 + rank), 2), DataLoader(Stream(10), 2, num_workers=1 + rank)):
        with pytest.raises(MismatchError) as caught:
            make(rank, world, given)
        found.append(str(caught.value))
    return found


def test_loaders_that_differ_are_named() -> None:
    for rank, (samples, processes) in enumerate(run_ranks(2, different_loaders)):
        assert samples.startswith(f"rank {rank}: the loader of rank 1 has samples 11, that of rank 0 10.")
        assert processes.startswith(f"rank {rank}: the loader of rank 1 has num_workers 2, that of rank 0 1.")


@pytest.mark.parametrize(
    ("given", "options", "kind", "message"),
    [
        (Numbers(3), {}, ArgumentTypeError, r"takes a torch.utils.data.DataLoader, got Numbers\. Wrap the dataset"),
        (nn.Linear(1, 1), {}, ArgumentTypeError, r"got Linear\. The model comes second"),
        (DataLoader(Numbers(3)), {"uneven": "pad"}, ConfigError, "uneven should be one of weight, join, drop, got 'pad'"),
        (DataLoader(Numbers(3)), {"model": nn.Linear(1, 1)}, ArgumentTypeError, r"got Linear\. Wrap the model first"),
        (DataLoader(Numbers(3)), {"count": len}, ConfigError, "Pass the model as well"),
        (DataLoader(Numbers(3), in_order=False), {}, ConfigError, "Leave in_order at its default"),
        (
            DataLoader(Numbers(3), sampler=DistributedSampler(Numbers(3), 2, 0)),
            {},
            ConfigError,
            "is divided already. Leave the sampler out",
        ),
        (
            DataLoader(Numbers(3), batch_sampler=BatchSampler(DistributedSampler(Numbers(3), 2, 0), 2, False)),
            {},
            ConfigError,
            "is divided already. Leave the sampler out",
        ),
        (
            DataLoader(Numbers(3), batch_sampler=[[0, 1], [2]]),
            {"split_batches": True},
            ConfigError,
            "batches of a batch sampler are not split",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(given: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make(0, 1, given, **options)
