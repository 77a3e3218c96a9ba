"""Going on where a loader stood: after a break, a crash, a restore inside the loop, and with the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

import phalanx
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from phalanx.errors import StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def make(given: DataLoader[Any], rank: int = 0, world: int = 1, **options: Any) -> Loader:
    return Loader(given, Exchange(rank, world, CPU), CPU, **options)


class Shuffling(IterableDataset[int]):
    """A stream that keeps a few samples back and draws one of them, by everybody's random numbers."""

    def __iter__(self) -> Iterator[int]:
        waiting: list[int] = []
        for number in range(24):
            waiting.append(number)
            if len(waiting) == 6:
                drawn = random.randrange(3) + int(torch.randint(2, ())) + np.random.randint(3)
                yield waiting.pop(drawn)
        yield from waiting


def numbers(loader: Loader, noise: list[float], stop: int | None = None) -> tuple[list[int], Any]:
    """An epoch up to `stop`, with a step that draws random numbers as dropout does; and the state there."""
    found: list[int] = []
    for step, batch in enumerate(loader, 1):
        found += batch.tolist()
        noise.append(float(torch.rand(())) + random.random() + float(np.random.rand()))
        if step == stop:
            return found, (loader.state_dict(), random.getstate(), np.random.get_state(), torch.get_rng_state())
    return found, None


GIVEN = {
    "own": lambda: DataLoader(range(24), 2, shuffle=True),  # type: ignore[arg-type]
    "own, generator": lambda: DataLoader(range(24), 2, shuffle=True, generator=torch.Generator().manual_seed(9)),  # type: ignore[arg-type]
    "own, in processes": lambda: DataLoader(range(24), 2, shuffle=True, num_workers=1),  # type: ignore[arg-type]
    "stream": lambda: DataLoader(Shuffling(), 2),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_is_not_dealt_out_resumes_with_its_own_shuffle_and_leaves_the_scripts_numbers(kind: str) -> None:
    def start() -> tuple[Loader, list[float]]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return make(GIVEN[kind](), sharded=kind != "stream"), []

    loader, expected = start()
    first, _ = numbers(loader, expected)
    second, _ = numbers(loader, expected)
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    loader, noise = start()
    numbers(loader, noise)
    head, saved = numbers(loader, noise, 4)
    state, pythons, numpys, torchs = saved
    resumed, _ = start()
    torch.manual_seed(77)
    resumed.load_state_dict(state)
    random.setstate(pythons), np.random.set_state(numpys), torch.set_rng_state(torchs)
    rest, _ = numbers(resumed, noise)
    assert head + rest == second
    assert noise == expected, "the script's random numbers were touched"


@pytest.mark.parametrize("kind", ["own", "stream"])
def test_steps_of_another_size_are_no_place_to_go_on(kind: str) -> None:
    """Two steps of four samples are not two of two: the samples between would be left out."""

    def given(size: int, num_workers: int = 0) -> DataLoader[Any]:
        data = Shuffling() if kind == "stream" else range(24)
        return DataLoader(data, size, num_workers=num_workers)  # type: ignore[arg-type]

    loader = make(given(2), sharded=kind == "own")
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    with pytest.raises(StateError, match=r"2 steps into epoch 0, .* were \[\[2, 1\]\], they are \[\[4, 1\]\]"):
        make(given(4), sharded=kind == "own").load_state_dict(state)
    if kind == "stream":
        with pytest.raises(StateError, match=r"were \[\[2, 1\]\], they are \[\[2, 2\]\]"):
            make(given(2, 2)).load_state_dict(state)
    make(given(2, 1), sharded=kind == "own").load_state_dict(state)
    make(given(4), sharded=kind == "own").load_state_dict({**state, "epoch": 1, "position": 0})


def test_a_loop_that_was_left_by_break_is_over_in_the_saved_state_too() -> None:
    def fresh() -> Loader:
        return make(DataLoader(range(12), 2, shuffle=True, generator=torch.Generator().manual_seed(3)))  # type: ignore[arg-type]

    loader = fresh()
    for step, _ in enumerate(loader, 1):
        inside = loader.state_dict()
        if step == 2:
            break
    after = loader.state_dict()
    following = [batch.tolist() for batch in loader]
    resumed = fresh()
    resumed.load_state_dict(after)
    assert [batch.tolist() for batch in resumed] == following and len(following) == 6
    resumed.load_state_dict(inside)
    assert (inside["epoch"], inside["position"]) == (0, 4) and len(list(resumed)) == 4


@pytest.mark.parametrize("outer", [False, True], ids=["", "in a handler"])
def test_a_save_in_the_handler_of_what_ended_the_loop_is_of_the_middle_of_its_epoch(outer: bool) -> None:
    def run() -> None:
        loader = make(DataLoader(range(12), 2))  # type: ignore[arg-type]
        try:
            for step, _ in enumerate(loader, 1):
                if step == 2:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert loader.state_dict()["position"] == 4
        # Handled, and the script goes on: its next loop is the next epoch.
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)

    if not outer:
        run()
        return
    try:
        raise ValueError
    except ValueError:
        run()


def test_an_iterator_that_ends_late_does_not_end_the_loop_after_it() -> None:
    loader = make(DataLoader(range(8), 2))  # type: ignore[arg-type]
    late = iter(loader)
    next(late)
    for _ in loader:
        del late
        break
    loader.set_epoch(5)
    late = iter(loader)
    next(late)
    again = iter(loader)
    next(again)
    del late
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (6, 2)


class Unsure(BatchSampler):
    """Says nothing, or something wrong, about its length."""

    def __init__(self, says: int | None) -> None:
        super().__init__(RandomSampler(range(12)), 2, False)
        self.says = says

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("nobody knows")
        return self.says


@pytest.mark.parametrize("says", [None, 4, 9])
def test_an_epoch_is_over_when_its_order_is_whatever_its_sampler_says(says: int | None) -> None:
    loader = make(DataLoader(range(12), batch_sampler=Unsure(says)))  # type: ignore[arg-type]
    places = []
    for _ in loader:
        state = loader.state_dict()
        places.append((state["epoch"], state["position"]))
    assert places == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]


def test_a_restored_place_can_be_saved_again_before_its_order_is_drawn() -> None:
    loader = make(DataLoader(range(8), 2, shuffle=True))  # type: ignore[arg-type]
    for _ in loader:
        state = loader.state_dict()
        break
    for _ in loader:
        pass
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    resumed = make(DataLoader(range(8), 2, shuffle=True))  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and len(list(resumed)) == 3


def test_a_state_loaded_in_the_loops_body_is_where_the_loop_goes_on() -> None:
    loader = make(DataLoader(range(10), 2))  # type: ignore[arg-type]
    states, seen = [], []
    for batch in loader:
        seen.append(batch.tolist())
        states.append(loader.state_dict())
        if len(seen) == 3:
            loader.load_state_dict(states[0])
    assert seen == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5], [6, 7], [8, 9]] and loader.epoch == 1
    # Of another epoch: this loop ends there, and the next one goes on.
    for _ in loader:
        loader.load_state_dict(states[1])
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]] and loader.epoch == 1
    # Loaded and left.
    for _ in loader:
        loader.load_state_dict(states[2])
        break
    assert loader.state_dict()["position"] == 6
    assert [batch.tolist() for batch in loader] == [[6, 7], [8, 9]]


def stands_in(rank: int, world: int, state: Any) -> Any:
    model = phalanx.DistributedDataParallel(nn.Linear(1, 1))
    mine = [torch.full((1,), float(10 * rank + k)) for k in range(2 + 6 * rank)]
    loader = make(DataLoader(mine, 2), rank, world, model=model, sharded=True)  # type: ignore[arg-type]
    if state is not None:
        loader.load_state_dict(state)
    states, found = [], []
    for batch in loader:
        found.append((batch.reshape(-1).tolist(), loader.count))
        states.append(loader.state_dict())
    return found, states


def test_a_run_resumes_where_a_rank_already_stands_in() -> None:
    whole = run_ranks(2, stands_in, None)
    states = [states for _, states in whole]
    assert states[0] == states[1] and len(states[0]) == 4
    for done in (1, 2, 3):
        again = run_ranks(2, stands_in, states[0][done - 1])
        assert [found for found, _ in again] == [found[done:] for found, _ in whole], done


class Dividing(Sampler[int]):
    """Divides a dataset by a shuffle that every rank draws from torch's numbers, which the script has seeded alike."""

    def __init__(self, rank: int, world: int) -> None:
        self.place = (rank, world)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist()[self.place[0] :: self.place[1]])


def divided(rank: int, world: int) -> list[int]:
    torch.manual_seed(4)
    given: Any = DataLoader(range(12), 2, sampler=Dividing(rank, world))  # type: ignore[arg-type]
    return [one for batch in make(given, rank, world, sharded=True) for one in batch.tolist()]


def test_samplers_of_ranks_that_are_seeded_alike_draw_alike() -> None:
    assert sorted(one for found in run_ranks(2, divided) for one in found) == list(range(12))
