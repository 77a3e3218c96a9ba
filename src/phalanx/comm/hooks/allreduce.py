"""The hooks that do not compress: the plain average, and none at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..bucket import GradBucket
from ..collectives import as_real
from .group import GroupLike, collectives_from


def allreduce_hook(process_group: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks in its own precision: what happens without a hook."""
    buffer = bucket.buffer()
    collectives = collectives_from(process_group)
    are_pairs = buffer.is_sparse and buffer.is_complex()
    if buffer.is_sparse:
        # Sparse sums are no verb of Collectives: they have no fixed size. c10d has them on gloo and nccl. Scaled in a copy:
        # the values may be those of the parameter's own gradient, which is the user's if the pass fails. As pairs of reals
        # already: c10d would make them, and leave the sum there.
        buffer = as_real(buffer.mul(1.0 / collectives.world))
        work = dist.all_reduce(buffer, group=collectives.group, async_op=True)
    else:
        work = collectives.all_reduce(buffer, scale=1.0 / collectives.world)

    def reduced(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what went wrong
        return torch.view_as_complex(buffer) if are_pairs else buffer

    future: torch.futures.Future[Any] = work.get_future()
    return future.then(reduced)


def noop_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own gradients. For measuring what communication costs; replicas drift apart."""
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.device.type == "cpu" else [buffer.device]
    )
    future.set_result(buffer)
    return future
