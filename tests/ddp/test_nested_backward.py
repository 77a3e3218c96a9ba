"""Reentrant checkpointing: gradients that come several times in one backward, at any step, on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm.hooks import allreduce_hook
from tests.cluster import run_ranks
from tests.ddp.by_hand import LARGE, alike, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

PLAIN, EARLY, LATE = range(3)

# Per step, what each of two ranks does: PLAIN recomputes nothing; EARLY a layer whose gradient comes last, so that nothing
# is late by it; LATE a second use of a layer whose bucket may have left already.
SCHEDULES = {
    "from the start": [(LATE, LATE)] * 3,
    "in turn": [(LATE, PLAIN), (PLAIN, LATE), (LATE, PLAIN)],
    "first in step 1 on one rank": [(PLAIN, PLAIN), (PLAIN, LATE), (PLAIN, PLAIN), (LATE, PLAIN)],
    "first in step 3": [(PLAIN, PLAIN)] * 3 + [(LATE, LATE), (LATE, LATE), (PLAIN, PLAIN)],
    "another in step 3": [(EARLY, EARLY)] * 3 + [(LATE, LATE), (LATE, LATE), (EARLY, EARLY)],
    "another in step 3 on one rank": [(EARLY, EARLY)] * 3 + [(EARLY, LATE), (LATE, LATE)],
}


class TwiceUsed(nn.Module):
    """`shared` is used twice in LATE: its second gradient comes from a nested backward, after that of `first`."""

    def __init__(self, width: int, recompute: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pre, self.first, self.shared, self.other = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.recompute = recompute or reentrant
        self.by_hand = False

    def forward(self, x: torch.Tensor, mode: int) -> torch.Tensor:
        def again(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layer(x) if self.by_hand else self.recompute(layer, x)

        x = again(self.pre, x) if mode == EARLY else self.pre(x)
        if mode == LATE:
            x = again(self.shared, x)
        return self.other(self.shared(torch.tanh(self.first(x))))


def reentrant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)


class Recomputing(torch.autograd.Function):
    """A user's own way of recomputing: a nested backward of which the graph says nothing."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, grads)
        return None, x.grad


def made(width: int, recompute: Callable[..., torch.Tensor] | None = None) -> tuple[TwiceUsed, TwiceUsed]:
    """The model, and a copy to compute by hand with."""
    model = TwiceUsed(width, recompute)
    plain: Any = unwrapped(model)
    plain.by_hand = True
    return model, plain


def cap_mb(width: int, per_bucket: int = 2) -> float:
    """With two of the four weights in a bucket, what is late for one must leave the other as it is."""
    return (per_bucket + 0.5) * width * width * 4 / 2**20


def loss_of(model: nn.Module, step: int, rank: int, width: int, modes: tuple[int, ...]) -> torch.Tensor:
    return model(inputs(step, rank, width).requires_grad_(), modes[rank]).square().mean()


WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "hook": {"hook": allreduce_hook},
}


def train(rank: int, world: int, width: int, schedule: str, way: str) -> None:
    model, plain = made(width)
    options = dict(WAYS[way])
    hook = options.pop("hook", None)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb(width), **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    for step, modes in enumerate(SCHEDULES[schedule]):
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width, modes).backward()
        expected = mean_by_hand(plain, world, lambda m, r, s=step, modes=modes: loss_of(m, s, r, width, modes))
        assert_mean(model, expected)


@everywhere
@widths
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nested_backwards_may_appear_at_any_step(schedule: str, way: str, width: int, backend: str) -> None:
    run_ranks(2, train, width, schedule, way, backend=backend)


def accumulate(rank: int, world: int, width: int) -> None:
    """Onto gradients that are there, of an earlier reduced backward: only what is new is averaged once more."""
    model, plain = made(width)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb(width))
    for modes in [(PLAIN, PLAIN), (PLAIN, LATE)]:
        wrapped.zero_grad()
        for step in range(2):
            loss_of(wrapped, step, rank, width, modes).backward()
        expected = mean_by_hand(
            plain,
            world,
            lambda m, r, modes=modes: loss_of(m, 0, r, width, modes) + loss_of(m, 1, r, width, modes),
        )
        assert_mean(model, expected)


@everywhere
@widths
def test_what_comes_late_is_added_to_gradients_that_were_there(width: int, backend: str) -> None:
    run_ranks(2, accumulate, width, backend=backend)


def own_recomputation(rank: int, world: int, width: int) -> None:
    model, plain = made(width, Recomputing.apply)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb(width))
    for step, modes in enumerate(SCHEDULES["first in step 1 on one rank"]):
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width, modes).backward()
        expected = mean_by_hand(plain, world, lambda m, r, s=step, modes=modes: loss_of(m, s, r, width, modes))
        assert_mean(model, expected)


@everywhere
@widths
def test_a_nested_backward_of_a_users_own_function_is_right_too(width: int, backend: str) -> None:
    run_ranks(2, own_recomputation, width, backend=backend)


# -- once more, and learnt -------------------------------------------------------------------------


def count_late_parts(rank: int, world: int) -> list[int]:
    from phalanx.ddp.passes import backward

    model, _ = made(LARGE)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb(LARGE))
    seen: list[int] = []
    reduce_late_part = backward.reduce_late_part

    def watched(run: Any, bucket: Any) -> None:
        seen[-1] += 1
        reduce_late_part(run, bucket)

    backward.reduce_late_part = watched
    try:
        for step, modes in enumerate([(PLAIN, PLAIN)] * 2 + [(PLAIN, LATE), (PLAIN, LATE), (LATE, PLAIN), (LATE, LATE)]):
            seen.append(0)
            wrapped.zero_grad()
            loss_of(wrapped, step, rank, LARGE, modes).backward()
    finally:
        backward.reduce_late_part = reduce_late_part
    return seen


def test_a_bucket_that_left_too_early_goes_once_more_on_every_rank_and_each_rank_learns_from_it() -> None:
    # Rank 1 meets it in step 2, rank 0 in step 4; what a rank has met once, its bucket waits for.
    assert run_ranks(2, count_late_parts) == [[0, 0, 1, 0, 1, 0]] * 2


# -- with ZeRO -------------------------------------------------------------------------------------


def train_sharded(
    rank: int, world: int, width: int, schedule: str, per_bucket: int, options: dict[str, Any]
) -> None:
    model, plain = made(width)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb(width, per_bucket))
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True, **options)
    by_hand = optim.SGD(plain.parameters(), lr=0.1)
    for step, modes in enumerate(SCHEDULES[schedule]):
        zero.zero_grad()
        loss_of(wrapped, step, rank, width, modes).backward()
        zero.step()
        means = mean_by_hand(plain, world, lambda m, r, s=step, modes=modes: loss_of(m, s, r, width, modes))
        for param, mean in zip(plain.parameters(), means, strict=True):
            param.grad = None if mean is None else mean.float()
        by_hand.step()
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, want)
            assert alike(param)


OVERLAPPED: list[dict[str, Any]] = [
    {},
    {"stage": 2},
    {"step_in_backward": False},
    {"step_in_backward": False, "stage": 2},
    {"partition": "parameter"},
]


@everywhere
@widths
# With one weight per bucket, buckets are given out while later gradients are still to come.
@pytest.mark.parametrize("per_bucket", [1, 2])
@pytest.mark.parametrize("options", OVERLAPPED, ids=str)
def test_nested_backwards_may_appear_at_any_step_of_an_overlapped_optimizer(
    options: dict[str, Any], per_bucket: int, width: int, backend: str
) -> None:
    for schedule in ("in turn", "first in step 3", "another in step 3 on one rank"):
        run_ranks(2, train_sharded, width, schedule, per_bucket, options, backend=backend)


def surprise_an_update(rank: int, world: int) -> str:
    model, _ = made(LARGE, Recomputing.apply)
    # A bucket per weight: the one that is late has been stepped when the gradient comes.
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.01)
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True)
    for step in range(2):
        zero.zero_grad()
        loss_of(wrapped, step, rank, LARGE, (PLAIN, PLAIN)).backward()
    zero.zero_grad()
    with pytest.raises(phalanx.PhalanxError) as raised:
        loss_of(wrapped, 2, rank, LARGE, (PLAIN, LATE)).backward()
    return str(raised.value)


def test_gradient_that_comes_after_the_update_it_belongs_to_is_an_error_on_every_rank() -> None:
    # Nothing can be done: no graph announces it, and the parameters have been stepped.
    for rank, message in enumerate(run_ranks(2, surprise_an_update)):
        assert message.startswith(f"rank {rank}: step 2")
        assert "'shared.weight'" in message and "step_in_backward=False" in message
