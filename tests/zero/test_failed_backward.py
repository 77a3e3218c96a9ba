"""Optimizers joined to a backward that raises, an update that raises, and another optimizer in the place of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.data.values import Exchange
from phalanx.errors import ReductionError
from tests.cluster import run_ranks
from tests.ddp.by_hand import Breaks, BrokenLayer, alike, everywhere, inputs, mean_by_hand, widths

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

DEPTH = 4


class Deep(nn.Module):
    """The backward raises when it has come to `breaks_at` layers from the front; at DEPTH before any parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(DEPTH))
        self.breaks_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number + 1 == self.breaks_at:
                x = Breaks.apply(x)
        return x


def made(width: int, **options: Any) -> tuple[Deep, Deep, Any, Any]:
    """A model with a bucket per layer, its like without a wrapper, the wrapper, and an optimizer joined to it."""
    model, plain = Deep(width), Deep(width)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=4e-6 * width * width)
    options = {"overlap_with_ddp": True, "lr": 0.1, **options}
    return model, plain, wrapped, phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, **options)


def loss_of(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return model(inputs(step, rank, width)).square().mean()


def means(plain: nn.Module, world: int, step: int, width: int) -> list[Any]:
    return mean_by_hand(plain, world, lambda m, r: loss_of(m, step, r, width))


def step_by_hand(plain: nn.Module, *gradients: list[Any]) -> None:
    with torch.no_grad():
        for param, *parts in zip(plain.parameters(), *gradients, strict=True):
            param -= 0.1 * torch.stack(parts).sum(0)


def check_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, want, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert alike(param.detach()), name


def fail_with_means(rank: int, world: int, width: int, breaks_at: int, stage: int) -> None:
    """What the first backward left for `step()` is not lost by a second that raises, wherever it does."""
    model, plain, wrapped, optimizer = made(width, step_in_backward=False, stage=stage)
    for step in range(2):  # the plan is settled, and by it gradients are divided
        optimizer.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        optimizer.step()
        step_by_hand(plain, means(plain, world, step, width))
    optimizer.zero_grad()
    loss_of(wrapped, 2, rank, width).backward()
    model.breaks_at = breaks_at
    with pytest.raises(BrokenLayer):
        loss_of(wrapped, 3, rank, width).backward()
    model.breaks_at = None
    loss_of(wrapped, 4, rank, width).backward()
    optimizer.step()
    # Of the broken one small gradients, which the reducer had given back, are in it: as without a wrapper.
    untouched = model.layers[:breaks_at] if width < 100 else model.layers
    step_by_hand(plain, means(plain, world, 2, width), means(plain, world, 4, width))
    for layer, want in zip(untouched, plain.layers, strict=False):
        torch.testing.assert_close(layer.weight, want.weight, rtol=1e-4, atol=1e-6)
    assert all(alike(param.detach()) for param in model.parameters())


@everywhere
@widths
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("breaks_at", [DEPTH, 1])
def test_means_that_wait_for_a_step_survive_a_backward_that_raises(
    breaks_at: int, stage: int, width: int, backend: str
) -> None:
    run_ranks(2, fail_with_means, width, breaks_at, stage, backend=backend)


@phalanx.zero.elementwise
class Brittle(optim.SGD):
    """Raises when it has stepped so many tensors more."""

    num_left = 1000

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not Brittle.num_left:
                        raise BrokenLayer("in the midst of a step")
                    Brittle.num_left -= 1
                    param -= group["lr"] * param.grad


def raise_in_update(rank: int, world: int, partition: str) -> None:
    model = Deep(16)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=4e-6 * 16 * 16)
    options = {"lr": 0.1, "overlap_with_ddp": True, "partition": partition}
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), Brittle, **options)
    for step in range(4):
        optimizer.zero_grad()
        Brittle.num_left = 1 if step == 2 else 1000
        if step < 2:
            loss_of(wrapped, step, rank, 16).backward()
            continue
        expected = (BrokenLayer, None) if step == 2 else (ReductionError, "some buckets had been updated")
        with pytest.raises(expected[0], match=expected[1]):
            loss_of(wrapped, step, rank, 16).backward()


@everywhere
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_an_update_that_raises_is_never_trained_on(partition: str, backend: str) -> None:
    run_ranks(2, raise_in_update, partition, backend=backend)


def take_over(rank: int, world: int, width: int, first: str, second: str) -> None:
    """The second optimizer is made for the same wrapper; the first has nothing to do with it any more."""
    model, plain, wrapped, earlier = made(width, partition=first)
    for step in range(3):
        earlier.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        earlier.step()
        step_by_hand(plain, means(plain, world, step, width))
    check_same(model, plain)
    earlier.zero_grad()
    later = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True, partition=second)
    for step in range(3, 6):
        later.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        later.step()
        step_by_hand(plain, means(plain, world, step, width))
        check_same(model, plain)


@everywhere
@widths
@pytest.mark.parametrize(("first", "second"), [("element", "parameter"), ("parameter", "element"), ("element", "element")])
def test_another_optimizer_takes_the_place_of_the_first(first: str, second: str, width: int, backend: str) -> None:
    run_ranks(2, take_over, width, first, second, backend=backend)


def gather_after_failure(rank: int, world: int, width: int, options: dict[str, Any]) -> None:
    """Each rank raises somewhere else, with other buckets under way; the next thing they do together is no forward."""
    model, _, wrapped, optimizer = made(width, **options)
    exchange = Exchange(rank, world, torch.device("cpu"))
    for step in range(6):
        optimizer.zero_grad()
        model.breaks_at = None if step < 2 else 1 + 2 * rank
        if model.breaks_at is None:
            loss_of(wrapped, step, rank, width).backward()
            optimizer.step()
            continue
        with pytest.raises(BrokenLayer):
            loss_of(wrapped, step, rank, width).backward()
        match step:
            case 2:
                optimizer.consolidate_state_dict()
            case 3:
                assert exchange.mean(float(rank)) == 0.5
            case 4:
                assert exchange.gather(rank) == [0, 1]
            case 5:
                optimizer.sharded_state_dict()


@everywhere
@widths
@pytest.mark.parametrize(
    "options", [{"overlap_with_ddp": False}, {"step_in_backward": False}], ids=["alone", "overlapped"]
)
def test_ranks_that_raised_in_different_places_can_do_something_else_together(
    options: dict[str, Any], width: int, backend: str
) -> None:
    run_ranks(2, gather_after_failure, width, options, backend=backend)


def fail_amid_updates(rank: int, world: int, width: int) -> None:
    """Buckets were stepped before the backward raised: whoever would keep the parameters is told."""
    model, _, wrapped, optimizer = made(width)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
    assert not optimizer.is_torn
    optimizer.zero_grad()
    model.breaks_at = 1
    with pytest.raises(BrokenLayer):
        loss_of(wrapped, 2, rank, width).backward()
    assert optimizer.is_torn
    for use in (optimizer.step, optimizer.consolidate_state_dict):
        with pytest.raises(ReductionError, match="between two steps"):
            use()


@everywhere
def test_an_optimizer_knows_that_a_backward_raised_amid_its_updates(backend: str) -> None:
    run_ranks(2, fail_amid_updates, 16, backend=backend)
