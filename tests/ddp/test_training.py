"""Training on several ranks equals training on one, and torch's own class, for every kind of model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from tests.cluster import run_ranks
from tests.ddp.zoo import ZOO, batch, make, prediction

pytestmark = pytest.mark.covering(1)

STEPS = 5
# Mean of means against mean over the whole batch: the sums are associated differently.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    # Not Adam: it turns the rounding noise of a gradient that is mathematically zero into full steps.
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.0 if name == "sparse" else 0.9)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_wrapped(rank: int, world: int, name: str, wrapper: str, **options: Any) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    model = make(name, seed=rank)  # different on each rank: construction replicates rank 0's
    kind = phalanx.DistributedDataParallel if wrapper == "phalanx" else nn.parallel.DistributedDataParallel
    wrapped = kind(model, bucket_cap_mb=0.001, **options)
    optimizer = _optimizer(model, name)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        nn.functional.mse_loss(prediction(wrapped(x)), y).backward()
        optimizer.step()
    return _state(model)


def train_alone(name: str, world: int) -> dict[str, torch.Tensor]:
    """One process, gradients of the ranks' slices averaged by hand."""
    model = make(name, seed=0)
    optimizer = _optimizer(model, name)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = torch.zeros(())
        for rank in range(world):
            x, y = batch(step, rank)
            loss = loss + nn.functional.mse_loss(prediction(model(x)), y) / world
        loss.backward()
        optimizer.step()
    return _state(model)


def assert_replicas_identical(states: list[dict[str, torch.Tensor]], but: str = "norm.") -> None:
    for rank, state in enumerate(states[1:], start=1):
        for key, value in state.items():
            if but not in key:
                assert torch.equal(value, states[0][key]), f"rank {rank} differs from rank 0 in {key}"


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", ZOO)
def test_three_ranks_train_as_one_process_does(name: str, views: bool) -> None:
    states = run_ranks(3, train_wrapped, name, "phalanx", gradient_as_bucket_view=views)
    assert_replicas_identical(states)
    if name == "cnn":
        return  # BatchNorm sees other batches on one process; compared with torch's class below.
    alone = train_alone(name, 3)
    for key, value in states[0].items():
        torch.testing.assert_close(value, alone[key], msg=lambda m, key=key: f"{key}: {m}", **TOLERANCE)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "gpt_checkpointed", "sparse", "many_outputs"])
def test_two_ranks_train_bit_for_bit_as_torch_does(name: str) -> None:
    options: dict[str, Any] = {"find_unused_parameters": True} if name == "many_outputs" else {}
    ours = run_ranks(2, train_wrapped, name, "phalanx", **options)
    theirs = run_ranks(2, train_wrapped, name, "torch", **options)
    assert_replicas_identical(ours)
    for key, value in ours[0].items():
        assert torch.equal(value, theirs[0][key]), key


@pytest.mark.parametrize("name", ["mlp", "experts"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_trains_as_one_process_does(name: str, world: int) -> None:
    states = run_ranks(world, train_wrapped, name, "phalanx")
    assert_replicas_identical(states)
    alone = train_alone(name, world)
    for key, value in states[0].items():
        torch.testing.assert_close(value, alone[key], **TOLERANCE)


@pytest.mark.parametrize("name", ["mlp", "gpt_reentrant", "tied_across_checkpoint", "many_outputs"])
def test_a_static_graph_trains_the_same_with_one_hook_a_bucket(name: str) -> None:
    states = run_ranks(2, train_wrapped, name, "phalanx", static_graph=True)
    assert_replicas_identical(states)
    plain = run_ranks(2, train_wrapped, name, "phalanx")
    for key, value in states[0].items():
        assert torch.equal(value, plain[0][key]), key
