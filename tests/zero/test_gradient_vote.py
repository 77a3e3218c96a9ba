"""Gradients that one rank alone has changed between backward and `step` of a `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.comm.hooks import allreduce_hook
from tests.cluster import run_ranks

pytestmark = pytest.mark.covering(1)

Change = Callable[[int, list[torch.Tensor]], Any]


def _clip(rank: int, params: list[torch.Tensor]) -> None:
    if rank == 1:
        nn.utils.clip_grad_norm_(params, 1e-3)


def _drop(rank: int, params: list[torch.Tensor]) -> None:
    if rank == 1:
        params[2].grad = None


def _noise(rank: int, params: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(rank)
    for param in params:
        if param.grad is not None:
            param.grad += torch.randn(param.shape, generator=generator)


def _nothing(rank: int, params: list[torch.Tensor]) -> None: ...


def said(rank: int, world: int, change: Change, with_hook: bool = False, **options: Any) -> list[str]:
    """What is warned of in some steps, from the third on with the change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model.register_parameter("spare", nn.Parameter(torch.zeros(8)))
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    if with_hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    optimizer = phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            optimizer.zero_grad()
            model.spare.grad = torch.zeros(8) if (step + rank) % 2 else None  # nobody has used it
            wrapped(torch.full((2, 8), rank + 1.0)).square().mean().backward()
            if step >= 2:
                change(rank, list(wrapped.parameters()))
            optimizer.step()
    return [str(each.message) for each in caught if "gradients of the ranks" in str(each.message)]


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize(
    ("change", "whose"),
    [(_clip, "'0.weight', '0.bias', '1.weight' and 3 more"), (_drop, "'0.bias'")],
    ids=["clipped", "dropped"],
)
def test_gradients_that_one_rank_has_changed_are_said_once_on_every_rank(partition: str, change: Change, whose: str) -> None:
    for words in run_ranks(3, said, change, partition=partition):
        assert len(words) == 1
        assert f"differ: {whose}, of rank 1 not as" in words[0]


def test_noise_of_each_rank_is_no_error() -> None:
    for words in run_ranks(2, said, _noise):
        assert len(words) == 1


def test_nothing_is_said_of_equal_gradients_nor_where_a_hook_makes_them() -> None:
    assert run_ranks(2, said, _nothing) == [[], []]
    assert run_ranks(2, said, _clip, with_hook=True) == [[], []]
