"""Whose gradients are whose: what a broken backward had taken goes back, and one loss may lead through many forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from tests.cluster import run_ranks
from tests.ddp.by_hand import SMALL, Net, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


class Breaking(torch.autograd.Function):
    """Raises in backward while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Breaking.armed:
            raise ArithmeticError("on purpose")
        return grads[0]


class Fragile(nn.Module):
    """The gradients of `net` and of `rows` have left when backward comes to `first`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.net = nn.Linear(width, width), Net(width)
        self.rows = nn.Embedding(7, width, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Breaking.apply(self.first(x))
        return self.net(x + self.rows(torch.tensor([3, 5, 3, 1])))


def _loss(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return model(inputs(step, rank, width)).square().mean()


def break_and_zero(rank: int, world: int, width: int, views: bool) -> None:
    """The user holds the gradients, and zeroes them in place after a backward that broke."""
    model = Fragile(width)
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=views)
    for step in range(2):
        wrapped.zero_grad()
        _loss(wrapped, step, rank, width).backward()
    held = [param.grad for param in model.parameters()]
    Breaking.armed = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        _loss(wrapped, 2, rank, width).backward()
    Breaking.armed = False
    there = [param.grad is not None for param in model.parameters()]
    # With views they are gone: the transport may still write to the memory that they are made of.
    assert views or all(there), f"gradients are gone: {there}"
    wrapped.zero_grad(set_to_none=False)
    _loss(wrapped, 3, rank, width).backward()
    assert_mean(model, mean_by_hand(plain, world, lambda m, r: _loss(m, 3, r, width)))
    dense = [(p.grad, one) for p, one in zip(model.parameters(), held, strict=True) if one.layout == torch.strided]
    assert views or all(grad is one for grad, one in dense), "a gradient has left the tensor that the user holds"


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_that_had_left_in_a_broken_backward_are_zeroed_where_the_user_holds_them(
    views: bool, width: int, backend: str
) -> None:
    run_ranks(2, break_and_zero, width, views, backend=backend)


class Sometimes(nn.Module):
    """`spare` is used in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.spare, self.net = nn.Linear(SMALL, SMALL), nn.Linear(SMALL, SMALL), Net(SMALL)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = Breaking.apply(self.first(x))
        return self.net(self.spare(x) if spare else x)


def break_alone(rank: int, world: int, views: bool) -> None:
    """Rank 0's backward breaks. Rank 1 has packed everything when it hears of that."""
    model = Sometimes()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=views, on_unused="ignore")
    for step, spare in ((0, True), (1, False)):
        model.first.zero_grad()
        model.net.zero_grad()
        wrapped(inputs(step, rank, SMALL), spare).square().mean().backward()
    earlier = [param.grad.clone() for param in model.spare.parameters() if param.grad is not None]
    assert len(earlier) == 2, "used in the first step"
    Breaking.armed = rank == 0
    with pytest.raises(ArithmeticError if rank == 0 else phalanx.PhalanxError):
        wrapped(inputs(2, rank, SMALL), False).square().mean().backward()
    Breaking.armed = False
    for param, before in zip(model.spare.parameters(), earlier, strict=True):
        assert param.grad is not None and torch.equal(param.grad, before)
    if rank == 0:
        # It completes the pass, and hears that rank 1 did not break, when it goes on.
        with pytest.raises(phalanx.PhalanxError):
            wrapped(inputs(3, rank, SMALL), False)


@everywhere
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_that_nobody_used_outlive_a_pass_that_one_rank_gave_up(views: bool, backend: str) -> None:
    run_ranks(2, break_alone, views, backend=backend)


def change_unused(rank: int, world: int, views: bool) -> None:
    """What no rank uses is nobody's mean, even if ranks have made something else of it."""
    model = Sometimes()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=views, on_unused="ignore")
    kept: dict[nn.Parameter, torch.Tensor] = {}
    for step in range(3):
        wrapped(inputs(step, rank, SMALL), step == 0).square().mean().backward()
        for param in model.spare.parameters():
            assert param.grad is not None, "used in the first step"
            assert step == 0 or torch.equal(param.grad, kept[param])
            param.grad.mul_(rank + 3)
            kept[param] = param.grad.clone()


@everywhere
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_that_nobody_used_stay_what_each_rank_made_of_them(views: bool, backend: str) -> None:
    run_ranks(2, change_unused, views, backend=backend)


class Again(nn.Module):
    """`twice` gets gradient twice, by nested backwards if asked to: while its bucket waits for `slow`, or around that."""

    def __init__(self, width: int, around: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.around = around
        self.slow, self.twice = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, nested: bool) -> torch.Tensor:
        for layer in (self.twice, self.slow, self.twice) if self.around else (self.slow, self.twice, self.twice):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if nested else layer(x))
        return x


def come_late(rank: int, world: int, width: int, views: bool, around: bool) -> None:
    model = Again(width, around)
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=views)

    def loss(m: nn.Module, step: int, rank: int) -> torch.Tensor:
        return m(inputs(step, rank, width).requires_grad_(), step >= 2).square().mean()

    for step in range(5):
        wrapped.zero_grad()
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))  # type: ignore[misc]


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("around", [False, True], ids=["before", "after"])
def test_what_comes_late_before_or_after_the_last_bucket_is_full_is_in_the_mean(
    around: bool, views: bool, width: int, backend: str
) -> None:
    run_ranks(2, come_late, width, views, around, backend=backend)


def add_up_losses(rank: int, world: int, last_is_reduced: bool) -> int:
    """A loss through two forwards, one of them under no_sync."""
    model = Net(SMALL)
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for step in range(3):
        wrapped.zero_grad()
        if last_is_reduced:
            with wrapped.no_sync():
                first = _loss(wrapped, step, rank, SMALL)
            second = _loss(wrapped, step + 100, rank, SMALL)
        else:
            first = _loss(wrapped, step, rank, SMALL)
            with wrapped.no_sync():
                second = _loss(wrapped, step + 100, rank, SMALL)
        (first + second).backward()

        def loss(m: nn.Module, r: int, step: int = step) -> torch.Tensor:
            return _loss(m, step, r, SMALL) + _loss(m, step + 100, r, SMALL)

        assert_mean(model, mean_by_hand(plain, world, loss))
    return wrapped.stats().num_steps


@pytest.mark.parametrize("last_is_reduced", [True, False])
def test_one_forward_outside_no_sync_is_enough_for_the_sum_of_losses(last_is_reduced: bool) -> None:
    assert run_ranks(2, add_up_losses, last_is_reduced) == [3, 3]
