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
    "from the second step on": [set(), {0, 1}, {0, 1}],
    "one rank, later": [set(), set(), {1}],
    "alternating ranks": [{0}, {1}, {0}],
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


def count_late(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    model = TiedAcrossCheckpoint()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    again: list[int] = []
    reduce_again = wrapped.reducer._reduce_again
    wrapped.reducer._reduce_again = lambda bucket: (again.append(bucket.index), reduce_again(bucket))
    seen = []
    for step in range(4):
        model.recompute = step >= 2 and rank == 1
        x, y = batch(step, rank)
        nn.functional.mse_loss(wrapped(x), y).backward()
        seen.append(bool(again))
        again.clear()
    return seen


def test_the_second_reduction_happens_once_and_is_learnt_from() -> None:
    assert run_ranks(2, count_late) == [[False, False, True, False]] * 2


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
