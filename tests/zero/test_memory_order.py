"""State follows its elements when parameters are laid out anew in memory, as `Module.to(memory_format=…)` does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from tests.cluster import run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

LAST = torch.channels_last


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3))


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


class Training:
    """A wrapped model with a sharded Adam, and the same with a plain one on the mean; `changed`: when memory changes."""

    def __init__(self, rank: int, world: int, changed: str, options: dict[str, Any]) -> None:
        self.rank, self.world = rank, world
        self.model = build()
        self.plain_model = copy.deepcopy(self.model)
        self.plain = optim.Adam(self.plain_model.parameters(), lr=0.01)
        if changed == "before the wrapper":
            self.zero = phalanx.ZeroRedundancyOptimizer(self.model.parameters(), optim.Adam, lr=0.01, **options)
            self.model.to(memory_format=LAST)
        self.wrapped = phalanx.DistributedDataParallel(self.model)
        if changed != "before the wrapper":
            if changed == "before the optimizer":
                self.model.to(memory_format=LAST)
            self.zero = phalanx.ZeroRedundancyOptimizer(self.model.parameters(), optim.Adam, lr=0.01, **options)

    def change(self, changed: str) -> None:
        self.zero.zero_grad()
        if changed == "with a new group":
            self.model.to(memory_format=LAST)
            for optimizer in (self.zero, self.plain):
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3), requires_grad=False)]})
        if changed == "with a new wrapper":
            self.model.to(memory_format=LAST)
            self.wrapped = phalanx.DistributedDataParallel(self.model)

    def step(self, number: int) -> list[str]:
        """Step both; what differs afterwards."""
        self.zero.zero_grad()
        loss(self.wrapped, number, self.rank).backward()
        self.zero.step()
        self.plain.zero_grad()
        for rank in range(self.world):
            (loss(self.plain_model, number, rank) / self.world).backward()
        self.plain.step()
        self.zero.consolidate_state_dict(0)
        pairs = dict(zip("abcdef", zip(self.model.parameters(), self.plain_model.parameters(), strict=True), strict=False))
        if self.rank == 0:
            mine, plain = self.zero.state_dict()["state"], self.plain.state_dict()["state"]
            assert mine.keys() == plain.keys()
            pairs |= {f"{key} of {n}": (mine[n][key], plain[n][key]) for n in plain for key in plain[n]}
        return [f"{number}: {name}" for name, (one, other) in pairs.items() if not torch.allclose(one, other, 1e-3, 1e-5)]


def train(rank: int, world: int, changed: str, options: dict[str, Any]) -> list[str]:
    training = Training(rank, world, changed, options)
    found = training.step(0) + training.step(1)
    training.change(changed)
    return found + training.step(2) + training.step(3)


OVERLAPPED = {"overlap_with_ddp": True}
LATER = {"overlap_with_ddp": True, "step_in_backward": False}
# Where the order by which state is counted, or cut, changes: with and without state by then.
CASES = {
    "alone, with a new group": ({}, "with a new group"),
    "overlapped, before the wrapper": (OVERLAPPED, "before the wrapper"),
    "overlapped, before the optimizer": (OVERLAPPED, "before the optimizer"),
    "overlapped, with a new wrapper": (OVERLAPPED, "with a new wrapper"),
    "stepped later, with a new group": (LATER, "with a new group"),
    "stepped later, with a new wrapper": (LATER, "with a new wrapper"),
}


@pytest.mark.parametrize("name", CASES)
def test_state_belongs_to_the_same_elements_in_another_order_of_memory(name: str) -> None:
    options, changed = CASES[name]
    assert run_ranks(2, train, changed, options) == [[], []]
