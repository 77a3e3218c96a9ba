"""An optimizer joined to backward while something changes: groups, dtypes, what is ignored, what comes late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.errors import ConfigError
from tests.cluster import run_ranks
from tests.ddp.by_hand import alike, everywhere, inputs, mean_by_hand, widths

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


class Turned(nn.Module):
    """Layers of one shape, used in another order than they are registered in; the last one perhaps twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, nested: bool = False) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        if nested:
            x = checkpoint(self.layers[2], x.clone().requires_grad_(), use_reentrant=True)
        for number in (1, 0, 3, 2):
            x = torch.tanh(self.layers[number](x))
        return x


class Pair:
    """A wrapped model with a joined optimizer, and the same trained by hand with the mean over all ranks."""

    def __init__(self, rank: int, world: int, width: int, **options: Any) -> None:
        self.rank, self.world, self.width = rank, world, width
        self.model, self.plain = Turned(width), Turned(width)
        for model in (self.model, self.plain):
            model.still = nn.Parameter(torch.ones(3), requires_grad=False)
        self.wrapped = phalanx.DistributedDataParallel(self.model, bucket_cap_mb=4e-6 * width * width)
        options = {"overlap_with_ddp": True, "lr": 0.1, **options}
        self.optimizer = phalanx.ZeroRedundancyOptimizer(self.model.parameters(), optim.SGD, **options)

    def loss(self, model: nn.Module, step: int, of: int, nested: bool) -> torch.Tensor:
        return model(inputs(step, of, self.width), nested).float().square().mean()

    def train(self, *data: tuple[int, bool]) -> None:
        """One step of the sum of these backwards, each with its own mean; then both are the same."""
        self.optimizer.zero_grad()
        total = [torch.zeros_like(param) for param in self.plain.parameters()]
        for step, nested in data:
            self.loss(self.wrapped, step, self.rank, nested).backward()
            mean = mean_by_hand(self.plain, self.world, lambda m, r, s=step, n=nested: self.loss(m, s, r, n))
            total = [one if other is None else one + other for one, other in zip(total, mean, strict=True)]
        self.optimizer.step()
        with torch.no_grad():
            for param, grad in zip(self.plain.parameters(), total, strict=True):
                param -= 0.1 * grad
        for (name, param), want in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            assert alike(param.detach()), name


def add_group(rank: int, world: int, width: int, in_backward: bool) -> None:
    pair = Pair(rank, world, width, step_in_backward=in_backward)
    for step in range(3):
        pair.train((step, False))
    pair.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3), requires_grad=False)]})
    for step in range(3, 6):
        pair.train((step, False))


@everywhere
@widths
@pytest.mark.parametrize("in_backward", [True, False])
def test_training_goes_on_with_a_group_that_was_added(in_backward: bool, width: int, backend: str) -> None:
    run_ranks(2, add_group, width, in_backward, backend=backend)


def change_rate(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    optimizer = phalanx.ZeroRedundancyOptimizer([nn.Parameter(torch.ones(8))], optim.SGD, lr=0.5, **options)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.125})
    return [group["lr"] for groups in (optimizer.param_groups, optimizer.optim.param_groups) for group in groups]


@pytest.mark.parametrize("options", [{}, {"partition": "parameter"}, {"overlap_with_ddp": True}], ids=str)
def test_a_rate_that_was_changed_before_a_group_was_added_stays(options: dict[str, Any]) -> None:
    assert run_ranks(2, change_rate, options) == [[0.25, 0.125] * 2] * 2


def change_dtype(rank: int, world: int, width: int, in_backward: bool, partition: str) -> None:
    pair = Pair(rank, world, width, step_in_backward=in_backward, partition=partition)
    for step in range(3):
        pair.train((step, False))
    pair.optimizer.zero_grad()
    pair.model.double()
    pair.plain.double()
    for step in range(3, 7):
        pair.train((step, False))


@everywhere
@widths
@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_training_goes_on_in_another_dtype(partition: str, in_backward: bool, width: int, backend: str) -> None:
    run_ranks(2, change_dtype, width, in_backward, partition, backend=backend)


def accumulate_late(rank: int, world: int, width: int, stage: int) -> None:
    """A bucket that has been given out, with what was carried into it, is given out again with its late part."""
    pair = Pair(rank, world, width, step_in_backward=False, stage=stage)
    pair.train((0, False))
    pair.train((1, False))
    pair.train((2, False), (3, True))
    pair.train((4, True), (5, True))


@everywhere
@widths
@pytest.mark.parametrize("stage", [1, 2])
def test_a_late_part_is_added_to_the_sum_of_two_backwards_once(stage: int, width: int, backend: str) -> None:
    run_ranks(2, accumulate_late, width, stage, backend=backend)


def ignore_one(rank: int, world: int) -> None:
    model = Turned(16)
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.2.weight"])
    wrapped = phalanx.DistributedDataParallel(model)
    phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(ConfigError, match=r"not reduced by DistributedDataParallel.*nobody would step it"):
        wrapped(inputs(0, rank, 16)).square().mean().backward()


def test_a_parameter_that_the_wrapper_ignores_is_refused_in_words() -> None:
    run_ranks(2, ignore_one)


def hook_in_double(rank: int, world: int) -> None:
    """The dtype changes, and then something makes the buckets anew before a forward has seen it."""
    for joins in (False, True):
        model, plain = Turned(16), Turned(16).double()
        wrapped = phalanx.DistributedDataParallel(model)
        wrapped.double()
        if joins:
            options: dict[str, Any] = {"lr": 0.0, "overlap_with_ddp": True, "partition": "parameter"}
            phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, **options)
        else:
            wrapped.register_comm_hook(None, phalanx.comm.hooks.allreduce_hook)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(inputs(step, rank, 16)).square().mean().backward()
        wanted = mean_by_hand(plain, world, lambda m, r: m(inputs(2, r, 16)).square().mean())
        for param, mean in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=1e-12, atol=1e-14)


def test_buckets_made_after_a_change_of_dtype_have_the_new_one() -> None:
    run_ranks(2, hook_in_double)
