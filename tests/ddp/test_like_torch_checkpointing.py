"""Activation checkpointing in every combination that torch tests on GPUs, and those that torch refuses."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from tests.cluster import run_ranks

pytestmark = pytest.mark.covering(1)

_ROWS = 6


class Recomputing(nn.Module):
    """`calls` names the layers in the order of use, in capitals where they are recomputed in backward."""

    def __init__(self, calls: list[str], reentrant: bool, tied: bool) -> None:
        super().__init__()
        self.calls, self.reentrant, self.count = calls, reentrant, 0
        self.layers = nn.ModuleDict({name: nn.Linear(5, 5) for name in "abc"})
        if tied:
            self.layers["a"].weight = self.layers["b"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.calls[self.count % len(self.calls)]:
            layer = self.layers[name.lower()]
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if name.isupper() else layer(x)
            x = torch.tanh(x)
        self.count += 1
        return x


# What runs in each forward; several entries take turns.
CALLS = {
    "one layer recomputed": ["aBc"],
    "one layer recomputed, one unused": ["aB"],
    "one layer recomputed twice": ["aBBc"],
    "a layer recomputed and not": ["aBbc"],
    "everything recomputed": ["ABC"],
    "layers take turns": ["aB", "bC", "cA"],
}


def gradients_agree(
    rank: int, world: int, calls: list[str], reentrant: bool, tied: bool, options: dict[str, bool]
) -> list[str]:
    """Sentences about gradients that differ from those of one process on the whole batch."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    alone = Recomputing(calls, reentrant, tied)
    wrapped = phalanx.DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.0001, **options)
    wrong = []
    for step in range(5):
        # The reentrant kind gives gradients only to what lies behind an input that needs one.
        whole = torch.randn(world * _ROWS, 5, requires_grad=True)
        alone.zero_grad(set_to_none=False)
        wrapped.zero_grad(set_to_none=False)
        alone(whole).square().mean().backward()
        wrapped(whole.detach()[rank * _ROWS : (rank + 1) * _ROWS].requires_grad_()).square().mean().backward()
        for (name, want), got in zip(alone.named_parameters(), wrapped.parameters(), strict=True):
            both_missing = want.grad is None and got.grad is None
            if not both_missing and (got.grad is None or not torch.allclose(got.grad, want.grad, atol=1e-6)):
                wrong.append(f"step {step}, {name}: {got.grad} in place of {want.grad}")
    return wrong


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("calls", CALLS)
def test_checkpointed_layers_get_the_whole_gradient(calls: str, reentrant: bool, tied: bool) -> None:
    turns = len(CALLS[calls])
    for views, static in itertools.product([False, True], [False, True]):
        if static and turns > 1:
            continue
        options = {"gradient_as_bucket_view": views, "static_graph": static, "find_unused_parameters": views}
        for wrong in run_ranks(2, gradients_agree, CALLS[calls], reentrant, tied, options):
            assert not wrong, f"{options}: {wrong}"


def wrapper_recomputed(rank: int, world: int, reentrant: bool, options: dict[str, bool]) -> list[bool]:
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    alone = nn.Sequential(shared, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), shared)
    wrapped = phalanx.DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.0001, **options)
    agree = []
    for _ in range(4):
        whole = torch.randn(world * _ROWS, 5)
        alone.zero_grad()
        wrapped.zero_grad()
        alone(whole).square().mean().backward()
        mine = whole[rank * _ROWS : (rank + 1) * _ROWS].clone().requires_grad_()
        checkpoint(wrapped, mine, use_reentrant=reentrant).square().mean().backward()
        pairs = zip(wrapped.parameters(), alone.parameters(), strict=True)
        agree.append(all(torch.allclose(got.grad, want.grad, atol=1e-6) for got, want in pairs))
    return agree


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_the_wrapper_itself_can_be_checkpointed(reentrant: bool) -> None:
    for views, static in itertools.product([False, True], [False, True]):
        options = {"gradient_as_bucket_view": views, "static_graph": static}
        assert run_ranks(2, wrapper_recomputed, reentrant, options) == [[True] * 4] * 2, options
