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
