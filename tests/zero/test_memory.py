"""Who holds how much: equal parts whatever the sizes of tensors, and a report that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import phalanx
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import Given, own_gradients

pytestmark = pytest.mark.timeout(60)


def state_bytes(optimizer: optim.Optimizer) -> int:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))


class Lopsided(nn.Module):
    """One embedding with 80 % of the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(800, 200)
        self.layers = nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 200))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(rows)).square().mean()


def train_lopsided(rank: int, world: int, overlapped: bool) -> Any:
    model = Lopsided()
    share = model.table.weight.numel() / sum(param.numel() for param in model.parameters())
    wrapped: Any = phalanx.DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=overlapped, lr=0.01)
    theirs = TorchZero(model.parameters(), optim.Adam, lr=0.01)
    for _ in range(3):
        zero.zero_grad()
        wrapped(torch.arange(16)).backward()
        zero.step()
    if not overlapped:
        theirs.step()
    return share, zero.memory(), state_bytes(theirs.optim)


@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_large_embedding_is_divided_like_anything_else(world: int, overlapped: bool) -> None:
    results = run_ranks(world, train_lopsided, overlapped)
    share, report, _ = results[0]
    assert 0.79 < share < 0.81
    states = [rank.state for rank in report.ranks]
    assert max(states) <= 1.01 * sum(states) / world
    if not overlapped and world == 2:
        theirs = [held for _, _, held in results]
        assert max(theirs) >= 1.5 * sum(theirs) / world  # what there is to win


def report(rank: int, world: int, options: dict[str, Any], overlapped: bool) -> Any:
    model = Given(((3000,), (5001,), (70, 90)))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=overlapped, lr=0.01, **options)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.02)
    for step in (0, 1):
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world)).backward()
        zero.step()
    apart = [param.detach().clone() for param in model.parameters()]  # shared ones are nobody else's to step
    plain = optim.Adam(apart)
    for param in apart:
        param.grad = torch.ones_like(param)
    plain.step()
    return zero.memory(), state_bytes(zero.optim), state_bytes(plain)


def test_the_report_has_the_bytes_of_every_rank() -> None:
    numel = 3000 + 5001 + 6300
    results = run_ranks(2, report, {}, False)
    found = results[0][0]
    assert all(one == found for one, _, _ in results)
    for (_, mine, plain), held in zip(results, found.ranks, strict=True):
        assert held.state == mine and held.parameters == 4 * numel
        assert abs(found.unsharded.state - plain) < 0.02 * plain
        assert held.total == held.state + held.gradients + held.parameters
    assert found.unsharded.gradients == found.unsharded.parameters == 4 * numel
    assert len(str(found).splitlines()) == 4 and "unsharded" in str(found)


def test_the_second_stage_holds_less_gradient_than_the_first() -> None:
    first = run_ranks(2, report, {"stage": 1}, True)[0][0]
    second = run_ranks(2, report, {"stage": 2}, True)[0][0]
    later = run_ranks(2, report, {"stage": 2, "step_in_backward": False}, True)[0][0]
    whole = first.unsharded.gradients
    assert all(rank.gradients >= whole for rank in first.ranks)
    assert all(rank.gradients < whole for rank in second.ranks)
    assert all(second.ranks[0].gradients < rank.gradients <= 1.6 * whole for rank in later.ranks)


@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
def test_shared_parameters_are_counted_once(overlapped: bool) -> None:
    found = run_ranks(2, report, {"shared_parameters": True}, overlapped)[0][0]
    assert [rank.parameters for rank in found.ranks] == [found.unsharded.parameters // 2] * 2


def grads_left(rank: int, world: int) -> list[bool]:
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, stage=2, lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    zero.step()
    return [param.grad is None for param in model.parameters()]


def test_the_second_stage_alone_frees_gradients_with_the_step() -> None:
    assert run_ranks(2, grads_left) == [[True] * 9] * 2
