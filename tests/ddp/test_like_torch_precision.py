"""Mixed precision as torch's tests describe it, given by torch's own class of options, on the CPU."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import phalanx
from tests.cluster import run_ranks


class Watched(nn.Module):
    """Asserts in forward what it was promised to see there."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.layer = nn.Linear(1, 5)
        self.frozen = nn.Parameter(torch.randn(10, 5), requires_grad=False)
        self.own = nn.Parameter(torch.randn(5))
        self.register_buffer("scale", torch.randn(1, 5))
        self.register_buffer("table", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lowered = [x, self.layer.weight, self.layer.bias, self.frozen, self.scale]
        assert {tensor.dtype for tensor in lowered} == {self.low}
        assert self.own.dtype == self.table.dtype == torch.float32, "ignored ones are left alone"
        return (self.layer(x) + self.frozen * self.scale).float() * self.own * self.table


def train(rank: int, world: int, low: torch.dtype, views: bool, to_none: bool) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Watched(low)
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own", "table"])
    config = _MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=config, gradient_as_bucket_view=views)
    x = torch.randn(10, 1) + rank
    for _ in range(6):
        wrapped(x).sum().backward()
        assert {param.dtype for param in wrapped.parameters()} == {torch.float32}
        assert model.frozen.grad is None and model.own.grad is not None
        grads = [model.layer.weight.grad, model.layer.bias.grad]
        assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)
        kept = [grad.clone() for grad in grads]
        wrapped.zero_grad(set_to_none=to_none)
    return [*kept, model.own.detach()]


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_keeps_its_promises_in_every_combination(low: torch.dtype) -> None:
    expected = None
    for views, to_none in itertools.product([False, True], [False, True]):
        first, second = run_ranks(2, train, low, views, to_none)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        expected = first if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True)), (views, to_none)
