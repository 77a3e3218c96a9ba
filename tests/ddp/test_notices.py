"""What raises nothing and spoils a run is said once, with the remedy; and nobody is told without reason."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phalanx
from phalanx.ddp.notices import accumulation, unmoved
from phalanx.ddp.notices.fingerprint import fingerprint, numbers_of
from phalanx.ddp.notices.first_inputs import FirstInputs
from phalanx.ddp.notices.repeated_order import visible_loaders
from tests.cluster import run_ranks


def _said(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in caught if str(each.message).startswith("rank")]


def _wrapped(**options: Any) -> phalanx.DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return phalanx.DistributedDataParallel(net, **options)


# -- the same samples on every rank ----------------------------------------------------------------


class Named(nn.Module):
    """Takes its inputs inside a mapping, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(50, 4)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["ids"]).sum()


def same_inputs(rank: int, world: int, what: str) -> list[str]:
    ddp = phalanx.DistributedDataParallel(Named()) if what == "named" else _wrapped()
    draw = torch.Generator().manual_seed(rank if what == "different" else 7)

    def train() -> None:
        x = torch.randn(4, 8, generator=draw)
        for step in range(20):
            if what != "constant":
                x = torch.randn(4, 8, generator=draw)
            if what == "same at first" and step == 2 and rank:
                x = x + 1
            batch: Any = {"ids": torch.randint(50, (3, 5), generator=draw)} if what == "named" else x
            adds_up = what == "accumulated" and step % 4 < 3
            with ddp.no_sync() if adds_up else nullcontext():
                ddp(batch).sum().backward()

    return _said(train)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("what", ["same", "named", "accumulated"])
def test_the_same_samples_on_every_rank_are_said_once_on_rank_0(what: str, backend: str) -> None:
    first, *others = run_ranks(3, same_inputs, what, backend=backend)
    assert len(first) == 1 and not any(others), (first, others)
    step = 0 if what == "accumulated" else 2
    assert first[0].startswith(f"rank 0: step {step}: all 3 ranks were given the same inputs"), first
    assert "worker.loader(DataLoader(…), model)" in first[0] and "filterwarnings" in first[0]


@pytest.mark.parametrize("what", ["different", "constant", "same at first"])
def test_other_inputs_are_not_taken_for_the_same(what: str) -> None:
    assert run_ranks(3, same_inputs, what, backend="gloo") == [[]] * 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_numbers_of_inputs_follow_their_elements_and_places(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).remainder(2 if dtype is torch.bool else 100).to(dtype)
    changed, turned = values.clone(), values.clone()
    changed[2, 3] = 0
    turned[0, 0], turned[0, 1] = values[0, 1], values[0, 0]
    several = [values, changed, turned, values.t(), (values, values), (values, changed), {"a": values, "b": 3}]
    numbers = [_number(each) for each in several]
    assert numbers[0] == _number(values.clone()), "the same elements, the same number"
    assert numbers[6] == numbers[0], "what is no tensor does not count"
    assert len(set(numbers[:6])) == 6


def _number(inputs: Any) -> int:
    found = fingerprint(inputs)
    assert found is not None and found.numbers is not None
    return found.numbers[0]


def test_a_parameter_without_elements_has_a_number_too() -> None:
    found = numbers_of([torch.ones(3), torch.empty(0), torch.empty(2, 0)])
    assert found is not None and found.numbers is not None and found.numbers[1:] == [0, 0]
    assert numbers_of([torch.ones(3), torch.empty(3, device="meta")]) is None


def test_inputs_without_tensors_have_no_number() -> None:
    assert fingerprint((3, "x", None, torch.empty(0), torch.empty(3, device="meta"))) is None
    inputs = FirstInputs()
    for _ in range(5):
        inputs.see((1, {}))
    assert inputs.numbers((0, 1, 2)) is None


# -- the same order in every epoch ----------------------------------------------------------------


def repeated(rank: int, world: int, how: str) -> list[str]:
    ddp = _wrapped()
    data = TensorDataset(torch.randn(40, 8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=how != "unshuffled")
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    seen = []

    class Trainer:
        def __init__(self) -> None:
            self.loader = loader

        def run(self) -> None:
            for epoch in range(3):
                if how == "set":
                    sampler.set_epoch(epoch)
                for (x,) in self.loader:
                    seen.append(x)
                    ddp(x).sum().backward()

    said = _said(Trainer().run)
    assert torch.equal(seen[0], seen[len(loader)]) == (how != "set"), "the epochs are as they are meant to be"
    return said


def test_an_order_that_repeats_is_said_where_the_sampler_can_be_seen() -> None:
    first, second = run_ranks(2, repeated, "forgotten", backend="gloo")
    assert second == [] and len(first) == 1
    assert first[0].startswith("rank 0: step 8: the second epoch of 5 batches") and "sampler.set_epoch(epoch)" in first[0]


@pytest.mark.parametrize("how", ["set", "unshuffled"])
def test_an_order_that_is_meant_is_not_said(how: str) -> None:
    assert run_ranks(2, repeated, how, backend="gloo") == [[], []]


# -- no_sync() ------------------------------------------------------------------------------------


def accumulated(rank: int, world: int, how: str) -> list[str]:
    ddp = _wrapped()
    draw = torch.Generator().manual_seed(rank)

    def train() -> None:
        for step in range(accumulation._MOST_LOCAL + 4):
            x = torch.randn(2, 8, generator=draw)
            if how == "backward inside":
                loss = ddp(x).sum()
                with ddp.no_sync():
                    loss.backward()
            else:
                with ddp.no_sync() if how == "for ever" or step % 4 < 3 else nullcontext():
                    ddp(x).sum().backward()

    return _said(train)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("backward inside", "step 0: a backward runs inside no_sync() whose forward ran outside"),
        ("for ever", f"step 0: {accumulation._MOST_LOCAL} backwards in a row had their forward inside no_sync()"),
    ],
)
def test_no_sync_in_the_wrong_place_is_said_once_on_each_rank(how: str, words: str) -> None:
    for rank, all_said in enumerate(run_ranks(2, accumulated, how, backend="phalanx")):
        said = [text for text in all_said if "no_sync" in text]  # no optimizer steps here, which is said as well
        assert len(said) == 1 and said[0].startswith(f"rank {rank}: {words}"), said


def test_no_sync_in_its_place_is_not_said() -> None:
    assert run_ranks(2, accumulated, "right", backend="phalanx") == [[], []]


# -- parameters -----------------------------------------------------------------------------------


def drifting(rank: int, world: int, how: str) -> list[str]:
    ddp = _wrapped()
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    if how == "hook":
        ddp.register_comm_hook(None, _local)
    draw = torch.Generator().manual_seed(rank)

    def train() -> None:
        for step in range(40):
            optimizer.zero_grad()
            ddp(torch.randn(4, 8, generator=draw)).square().mean().backward()
            if how == "limits":
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3 * (1 + rank))
            optimizer.step()
            if how == "one alone" and step == 20 and rank == 2:
                with torch.no_grad():
                    ddp.module[0].weight.add_(1)

    return _said(train)


def _local(state: object, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients stay local, as in local SGD."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(("how", "step", "who"), [("limits", 4, "rank 1 and 1 more"), ("one alone", 32, "rank 2")])
def test_parameters_that_drift_apart_are_said_on_rank_0(how: str, step: int, who: str) -> None:
    first, *others = run_ranks(3, drifting, how, backend="phalanx")
    assert len(first) == 1 and not any(others), (first, others)
    assert first[0].startswith(f"rank 0: step {step}: the parameters of the ranks have drifted apart: '0.weight' of {who}")


@pytest.mark.parametrize("how", ["alike", "hook"])
def test_parameters_that_are_equal_or_meant_to_differ_are_not_said(how: str) -> None:
    assert run_ranks(2, drifting, how, backend="gloo") == [[], []]


# -- parameters that nobody steps -----------------------------------------------------------------


def standing(rank: int, world: int, how: str) -> list[str]:
    ddp = _wrapped()
    others = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(others.parameters() if how == "a copy" else ddp.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)

    def train() -> None:
        for step in range(unmoved._SECOND + 2):
            if how != "added up":
                ddp.zero_grad()
            scale = 0.0 if how == "no gradient" else 1.0
            (scale * ddp(torch.randn(4, 8, generator=draw)).square().mean()).backward()
            if how in ("stepped", "a copy") or (how == "added up" and step == 100):
                optimizer.step()

    return _said(train)


def test_an_optimizer_with_the_parameters_of_another_model_is_said_on_rank_0() -> None:
    first, second = run_ranks(2, standing, "a copy")
    assert len(first) == 1 and "or the optimizer has the parameters of another model" in first[0] and not second


@pytest.mark.parametrize("how", ["stepped", "added up", "no gradient"])
def test_parameters_that_move_or_have_no_reason_to_are_not_said(how: str) -> None:
    assert run_ranks(2, standing, how) == [[], []]


# -- NaN ------------------------------------------------------------------------------------------


def spoiled(rank: int, world: int, how: str, options: dict[str, Any]) -> list[str]:
    """Rank 1 has a bad sample in step 3."""
    ddp = _wrapped(**options)
    lr = 1e38 if how == "too large" else 0.1
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=2.0)
    draw = torch.Generator().manual_seed(rank)
    if how == "initialised":
        with torch.no_grad():
            ddp.module[2].bias.fill_(torch.nan)

    def train() -> None:
        for step in range(9):
            x = torch.randn(4, 8, generator=draw)
            if step == 3 and rank == 1 and how not in ("sound", "too large", "initialised"):
                x[0, 0] = torch.nan
            scaler.scale(ddp(x).square().mean()).backward()
            if how != "adding":
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            elif step == 6:
                optimizer.step()  # of the mean of several backwards, each averaged

    return _said(train)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    ("how", "step", "words"),
    [
        ("bad sample", 4, "gradients of step 3 were (rank 1: '2.bias', '2.weight'"),
        ("adding", 7, "gradients of step 3 were (rank 1: "),
        ("initialised", 0, "they were before the first step"),
    ],
)
def test_nan_that_has_reached_the_parameters_is_said_with_its_cause(how: str, step: int, words: str, backend: str) -> None:
    first, *others = run_ranks(3, spoiled, how, {}, backend=backend)
    assert len(first) == 1 and not any(others), (first, others)
    assert first[0].startswith(f"rank 0: step {step}: parameter '") and "is NaN or infinite" in first[0]
    assert words in first[0], first


def test_parameters_that_a_step_made_infinite_are_said_without_a_rank() -> None:
    first, second = run_ranks(2, spoiled, "too large", {}, backend="gloo")
    assert second == [] and len(first) == 1 and "lower the learning rate" in first[0], first


@pytest.mark.parametrize(("how", "options"), [("sound", {}), ("scaler", {}), ("bad sample", {"on_nonfinite": "ignore"})])
def test_who_skips_bad_steps_or_does_not_ask_hears_nothing(how: str, options: dict[str, Any]) -> None:
    assert run_ranks(2, spoiled, how, options, backend="phalanx") == [[], []]


class _Seen:
    """Something that can be held weakly."""


def test_looking_for_loaders_keeps_nothing_alive_that_a_function_lets_go() -> None:
    def trains() -> tuple[bool, dict[str, Any]]:
        logits, held = _Seen(), locals()
        visible_loaders()
        assert held["logits"] is logits, "what the user holds is left alone"
        return True, held

    def lets_go() -> bool:
        logits = _Seen()
        seen = weakref.ref(logits)
        visible_loaders()
        del logits
        return seen() is None

    assert lets_go() and trains()[1]["logits"]
