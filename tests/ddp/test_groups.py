"""Other groups: sub-groups, shrinking and growing without rebuilding the wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from tests.cluster import run_ranks
from tests.ddp.by_hand import SMALL, Net, inputs, mean_by_hand, unwrapped
from tests.ddp.zoo import batch, make


def _train(wrapped: nn.Module, steps: range, rank: int) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, rank)
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()


def shrink_and_grow(rank: int, world: int) -> list[torch.Tensor] | None:
    pair = dist.new_group([0, 1])
    triple = dist.new_group([0, 1, 2])
    wrapped = None
    if rank < 2:
        wrapped = phalanx.DistributedDataParallel(make("mlp"), process_group=pair, bucket_cap_mb=0.001)
        _train(wrapped, range(3), rank)
        wrapped.update_process_group(triple)
    elif rank == 2:
        wrapped = phalanx.DistributedDataParallel(make("mlp", seed=9), process_group=triple, bucket_cap_mb=0.001)
    if wrapped is not None:
        _train(wrapped, range(3, 6), rank)
        assert wrapped.reducer.collectives.world == 3
    if rank < 2 and wrapped is not None:
        wrapped.update_process_group(pair)
        _train(wrapped, range(6, 8), rank)
    dist.barrier()
    return None if wrapped is None else [param.detach().clone() for param in wrapped.parameters()]


def test_a_wrapper_grows_to_a_larger_group_and_shrinks_again() -> None:
    results = run_ranks(4, shrink_and_grow)
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        ranks = 3 if 3 <= step < 6 else 2
        optimizer.zero_grad()
        for rank in range(ranks):
            x, y = batch(step, rank)
            (nn.functional.mse_loss(model(x), y) / ranks).backward()
        optimizer.step()
    for first, second, want in zip(results[0], results[1], model.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, want.detach(), rtol=1e-4, atol=1e-6)
    assert results[3] is None


def grow_in_double(rank: int, world: int) -> None:
    pair, triple = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    plain = Net(SMALL).double()
    if rank < 2:
        wrapped = phalanx.DistributedDataParallel(Net(SMALL), process_group=pair)
        wrapped(inputs(0, rank, SMALL)).sum().backward()
        wrapped.double()
        wrapped.zero_grad()
        wrapped.update_process_group(triple)
    else:
        wrapped = phalanx.DistributedDataParallel(unwrapped(plain), process_group=triple)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(step, rank, SMALL).double()).square().mean().backward()
        means = mean_by_hand(plain, 3, lambda m, r, s=step: m(inputs(s, r, SMALL).double()).square().mean())
        for param, want in zip(wrapped.parameters(), means, strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-14)


def test_a_model_that_has_gone_to_another_dtype_goes_to_another_group_in_it() -> None:
    run_ranks(3, grow_in_double)


def two_groups_at_once(rank: int, world: int) -> list[torch.Tensor]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrapped = phalanx.DistributedDataParallel(make("mlp"), process_group=groups[rank % 2])
    _train(wrapped, range(3), rank)
    return [param.detach().clone() for param in wrapped.parameters()]


def test_sub_groups_train_apart() -> None:
    results = run_ranks(4, two_groups_at_once)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[3], strict=True))
    assert not torch.equal(results[0][0], results[1][0])
