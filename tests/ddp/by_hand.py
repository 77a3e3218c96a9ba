"""What one process gets for the data of all ranks: the mean, computed by hand, and the comparison with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# A square weight of 1 KiB, and one of 81 KiB: from 64 KiB on a gradient is moved as soon as it arrives.
SMALL, LARGE = 16, 144

widths = pytest.mark.parametrize("width", [SMALL, LARGE], ids=["small", "large"])
everywhere = pytest.mark.parametrize("backend", ["gloo", "phalanx"])

Loss = Callable[[nn.Module, int], torch.Tensor]
Gradients = list[torch.Tensor | None]


class Net(nn.Module):
    """Two layers; the first has a square weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class BrokenLayer(ArithmeticError):
    """What the tests raise in backward."""


class Breaks(torch.autograd.Function):
    """Raises when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise BrokenLayer("on purpose")


def inputs(step: int, rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator) * (rank + 1)


def unwrapped(model: nn.Module) -> nn.Module:
    """A copy to compute by hand with; to be made before the model is wrapped, so that no hook comes along."""
    return copy.deepcopy(model)


def mean_by_hand(plain: nn.Module, world: int, loss: Loss, weights: Sequence[float] | None = None) -> Gradients:
    """The gradients of Σ weight · loss(rank) / Σ weight, each rank's taken by itself."""
    shares = [1.0] * world if weights is None else list(weights)
    total: Gradients = [None] * len(list(plain.parameters()))
    for rank, share in enumerate(shares):
        plain.zero_grad()
        loss(plain, rank).backward()
        for index, param in enumerate(plain.parameters()):
            if param.grad is not None:
                part = param.grad.to_dense().to(_wide(param.dtype)) * (share / sum(shares))
                before = total[index]
                total[index] = part if before is None else before + part
    plain.zero_grad()
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def assert_mean(model: nn.Module, expected: Gradients, tolerance: float = 1e-5) -> None:
    """On every rank: gradients are the expected ones, and bit for bit those of the other ranks."""
    for (name, param), want in zip(model.named_parameters(), expected, strict=True):
        got = param.grad
        if want is None or got is None:
            assert got is want, f"{name}: .grad is {got}, expected {want}"
            continue
        got = got.to_dense()
        off = float((got.to(want.dtype) - want).norm() / want.norm().clamp(min=1e-30))
        assert off <= tolerance, f"{name} is off by {off:.2g} of its norm"
        assert alike(got), f"{name} is not the same on all ranks"


def alike(tensor: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits. Every rank calls it."""
    mine = tensor.detach().resolve_conj().resolve_neg().contiguous()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(one, every[0]) for one in every)
