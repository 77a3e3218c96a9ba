"""Reentrant checkpointing: gradients that come several times in one backward, at any step, on any rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import phalanx
from tests.cluster import run_ranks
from tests.ddp.zoo import TiedAcrossCheckpoint, batch

# (per step) the ranks that recompute with the reentrant checkpoint.
PATTERNS = {
    "always": [{0, 1}, {0, 1}, {0, 1}],
    "alternating ranks": [{0}, {1}, {0}],
    "now and then": [{1}, set(), {0, 1}],
}


def train(rank: int, world: int, recomputing: list[set[int]], views: bool) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=views)
    seen = []
    for step, ranks in enumerate(recomputing):
        wrapped.zero_grad()
        model.recompute = rank in ranks
        x, y = batch(step, rank)
        nn.functional.mse_loss(wrapped(x), y).backward()
        seen.append([param.grad.clone() for param in model.parameters()])
    return seen


def mean(world: int, step: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    model.recompute = False
    for rank in range(world):
        x, y = batch(step, rank)
        (nn.functional.mse_loss(model(x), y) / world).backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_whole_even_if_a_nested_backward_adds_to_a_bucket_that_has_left(pattern: str) -> None:
    results = run_ranks(2, train, PATTERNS[pattern], False)
    for step in range(3):
        for first, second, want in zip(results[0][step], results[1][step], mean(2, step), strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, want)


def count_again(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    again: list[int] = []
    reduce_again = wrapped.reducer._reduce_again
    wrapped.reducer._reduce_again = lambda bucket: (again.append(bucket.index), reduce_again(bucket))
    seen = []
    for step in range(4):
        model.recompute = (rank == 0 and step == 0) or (rank == 1 and step >= 2)
        x, y = batch(step, rank)
        nn.functional.mse_loss(wrapped(x), y).backward()
        seen.append(bool(again))
        again.clear()
    return seen


def test_a_bucket_that_left_too_early_goes_again_on_every_rank_and_that_is_learnt_from() -> None:
    # Rank 0 shows everybody in step 0 that backwards can be nested; rank 1 meets it in step 2 and has learnt by 3.
    assert run_ranks(2, count_again) == [[False, False, True, False]] * 2


def surprise(rank: int, world: int) -> tuple[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for step in range(2):
        model.recompute = step == 1 and rank == 1
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(wrapped(x), y)
        if step == 0:
            loss.backward()
            continue
        with pytest.raises(phalanx.PhalanxError) as raised:
            loss.backward()
    wrapped.zero_grad()
    nn.functional.mse_loss(wrapped(x), y).backward()
    return str(raised.value), [param.grad.clone() for param in model.parameters()]


def test_the_first_nested_backward_after_many_plain_ones_may_be_refused_but_not_twice() -> None:
    results = run_ranks(2, surprise)
    for rank, (message, _) in enumerate(results):
        assert message.startswith(f"rank {rank}: step 1") and "run this step again" in message
    for first, second, want in zip(results[0][1], results[1][1], mean(2, 1), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, want)


def late_view(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    for step in range(2):
        model.recompute = step == 1 and rank == 1
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(wrapped(x), y)
        if step == 0:
            loss.backward()
            continue
        with pytest.raises(phalanx.PhalanxError) as raised:
            loss.backward()
    return str(raised.value)


def test_with_views_a_late_gradient_is_an_error_on_every_rank() -> None:
    for rank, message in enumerate(run_ranks(2, late_view)):
        assert message.startswith(f"rank {rank}: step 1")
        assert "'shared." in message and "use_reentrant=False" in message


def test_with_views_the_first_step_is_whole_and_later_ones_too() -> None:
    results = run_ranks(2, train, PATTERNS["always"], True)
    for step in range(3):
        for first, second, want in zip(results[0][step], results[1][step], mean(2, step), strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, want)
