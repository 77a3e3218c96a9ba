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
from tests.ddp.by_hand import SMALL, alike, everywhere, inputs, mean_by_hand, unwrapped, widths

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


def let_go_in_double(rank: int, world: int) -> None:
    pair = Pair(rank, world, SMALL)
    for step in range(3):
        pair.train((step, False))
    pair.optimizer.zero_grad()
    pair.model.double()
    pair.optimizer.let_go()
    plain = unwrapped(pair.model)
    for step in range(2):
        pair.wrapped.zero_grad()
        pair.wrapped(inputs(step, rank, SMALL)).square().mean().backward()
        means = mean_by_hand(plain, world, lambda m, r, s=step: m(inputs(s, r, SMALL)).square().mean())
        for param, want in zip(pair.model.parameters(), means, strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-14)


def test_a_model_that_has_gone_to_another_dtype_is_let_go_in_it() -> None:
    run_ranks(2, let_go_in_double)


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


def join_two_midway(rank: int, world: int) -> None:
    """Two wrappers share a backward, and get their optimizers after it; then each rank leaves out another layer."""
    pairs = [[nn.ModuleList(nn.Linear(SMALL, SMALL) for _ in range(3)) for _ in range(2)] for _ in range(2)]
    for one, other in zip(*pairs, strict=True):
        other.load_state_dict(one.state_dict())
    models, plain = [[Skipping(layers) for layers in side] for side in pairs]
    wrapped = [phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0012, on_unused="ignore") for model in models]

    def loss(of: list[Any], step: int, each: int) -> torch.Tensor:
        return sum(model(inputs(step, each, SMALL), step > 0 and each == 0) for model in of)

    loss(wrapped, 0, rank).backward()
    joined = {"overlap_with_ddp": True, "lr": 0.1}
    optimizers = [phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, **joined) for model in models]
    alone = optim.SGD([param for model in plain for param in model.parameters()], lr=0.1)
    for step in range(1, 4):
        for each in optimizers:
            each.zero_grad()
        loss(wrapped, step, rank).backward()
        alone.zero_grad()
        sum(loss(plain, step, each) / world for each in range(world)).backward()
        alone.step()
    for model, other in zip(models, plain, strict=True):
        torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


class Skipping(nn.Module):
    """Layers of which the last but one may be left out."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if skips and number == 1 else torch.tanh(layer(x))
        return x.square().mean()


@everywhere
def test_wrappers_that_share_a_backward_are_joined_midway(backend: str) -> None:
    run_ranks(2, join_two_midway, backend=backend, timeout_s=30, pg_timeout_s=10)


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


def gradients_of_one_rank(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(40, 10)
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    for _ in range(2):
        if rank == 0:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
        zero.step()
    return [param.detach().clone() for param in model.parameters()]


def test_a_rank_without_gradients_gathers_with_the_others() -> None:
    """Without a wrapper nobody sees to it that all ranks have gradients: those that have step their part, all take part."""
    first, second = run_ranks(2, gradients_of_one_rank, timeout_s=30, pg_timeout_s=10)
    assert all(map(torch.equal, first, second))
