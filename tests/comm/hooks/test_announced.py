"""What a hook of the user's own sends by torch's own collectives is told to the other ranks before gloo is given it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.comm import hooks
from phalanx.comm.failure.board import board_of
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


def _told(rank: int, world: int) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=0.0003)
    apart = dist.new_group()

    def own(state: Any, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # On a group of its own, which is not announced to the ranks of the wrapper's.
        dist.all_reduce(torch.ones(1), group=apart)
        if rank == 0:
            return hooks.allreduce_hook(None, bucket)
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    wrapped.register_comm_hook(None, own)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
    gradients = [param.grad for param in wrapped.parameters() if param.grad is not None]
    return board_of(wrapped.process_group).launched, gradients


def test_what_a_users_own_hook_sends_is_told_once() -> None:
    (launched, means), (other, theirs) = run_ranks(2, _told, backend="gloo")
    assert launched == other
    assert len(means) == 4
    for mine, yours in zip(means, theirs, strict=True):
        torch.testing.assert_close(mine, yours)


def _gather_and_scatter(state: Any, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean by way of rank 0, then by an exchange of slices of which one is larger than the others."""
    buffer, rank, world = bucket.buffer(), dist.get_rank(), dist.get_world_size()
    got = [torch.empty_like(buffer) for _ in range(world)] if rank == 0 else None
    dist.gather(buffer, got, dst=0)
    if got is not None:
        buffer.copy_(torch.stack(got).mean(0))
    dist.broadcast(buffer, 0)
    sizes = [buffer.numel() - (world - 1), *[1] * (world - 1)]
    parts = torch.empty(world * sizes[rank])
    dist.all_to_all_single(parts, buffer, [sizes[rank]] * world, sizes)
    assert torch.equal(parts.view(world, -1), buffer.split(sizes)[rank].expand(world, -1)), "all have the mean"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _mean_of(rank: int, world: int) -> float:
    wrapped = phalanx.DistributedDataParallel(nn.Linear(8, 8))
    wrapped.register_comm_hook(None, _gather_and_scatter)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, 8), 1.0 + rank)).sum().backward()
    gradient = next(wrapped.parameters()).grad
    assert gradient is not None
    return gradient[0, 0].item()


def test_ranks_may_write_different_numbers_of_elements_where_the_collective_allows_it() -> None:
    assert run_ranks(3, _mean_of, backend="gloo") == [2.0, 2.0, 2.0]
