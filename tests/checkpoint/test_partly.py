"""What a restore leaves as it is, and what it must not leave: gradients, states that were not chosen, ranks' own states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from phalanx import Checkpointer, DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from phalanx.errors import StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.ones(2, 3))).sum().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


# -- gradients -------------------------------------------------------------------------------------


def test_going_back_leaves_no_gradient_of_the_step_that_failed(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        step(model, optimizer)
        checkpointer.save(1)
        optimizer.zero_grad()
        backward(model, float("nan"))
        checkpointer.restore(skip=["bias"])
        assert model.weight.grad is None and model.bias.grad is not None, "what is skipped stays as it is"
        checkpointer.restore()
    assert model.bias.grad is None
    backward(model)
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def rolled_back(rank: int, world: int, folder: str, overlaps: bool) -> bool:
    model = DistributedDataParallel(nn.Linear(3, 3))
    options = {"overlap_with_ddp": True, "step_in_backward": False} if overlaps else {}
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)
    step(model, optimizer, 2)
    with Checkpointer(folder, model, optimizer) as checkpointer:
        checkpointer.save(1)
        optimizer.zero_grad()
        backward(model)
        checkpointer.restore()
    expected = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    backward(model)
    optimizer.step()
    return all(torch.allclose(value, expected[name] - 0.2) for name, value in model.module.named_parameters())


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
def test_going_back_between_backward_and_step_of_a_divided_optimizer(tmp_path: Path, overlaps: bool) -> None:
    # A gradient is 2 for every element: two samples of ones.
    assert run_ranks(2, rolled_back, str(tmp_path), overlaps) == [True, True]


# -- parts that say beforehand whether they fit --------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


def loader_of(rank: int, world: int) -> Loader:
    return Loader(DataLoader(Stream(), 2), Exchange(rank, world, CPU), CPU)


def save_mid_epoch(rank: int, world: int, folder: str) -> None:
    loader = loader_of(rank, world)
    model = nn.Linear(3, 3)
    with Checkpointer(folder, model, loader=loader) as checkpointer, torch.no_grad():
        for _ in loader:
            checkpointer.save(1)
            break


def test_a_loader_that_cannot_go_on_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    run_ranks(2, save_mid_epoch, str(tmp_path))
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with Checkpointer(tmp_path, model, loader=loader_of(0, 1)) as checkpointer:
        with pytest.raises(StateError, match="a stream that was read on 2 ranks stands in the middle of epoch 0"):
            checkpointer.restore()
        assert torch.equal(model.weight, before)
        assert checkpointer.restore(parts=["model"]) is not None and not torch.equal(model.weight, before)
