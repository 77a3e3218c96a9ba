"""Collectives over any c10d process group: gloo, nccl, mpi, ucc, or one registered by others.

Adds nothing to the transport. Must not know of gradients, buckets or steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collectives, Work, as_real
from .group.process_group import collectives_of
from .memory.pages import zeros_in_pages


def _started(work: Any) -> Work:
    """c10d's functions return None on ranks outside the group, where none of ours is ever called."""
    started: Work = work
    return started


class TorchCollectives(Collectives):
    """Collectives by the public functions of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return zeros_in_pages(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # Scaling first keeps half-precision sums in range, whatever the number of ranks.
            tensor.mul_(scale)
        return _started(dist.all_reduce(as_real(tensor), group=self.group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # In place, which `Collectives` allows: a copy would cost a pass over memory and the memory itself.
            input.mul_(scale)
        return _started(
            dist.reduce_scatter_single(as_real(output), as_real(input), group=self.group, async_op=True)
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return _started(dist.all_gather_single(as_real(output), as_real(input), group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return _started(dist.broadcast(as_real(tensor), group=self.group, group_src=source, async_op=True))


def collectives_for(group: dist.ProcessGroup) -> Collectives:
    """The fastest collectives that this group offers."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        # Here and not above: GlooCollectives derives from the class in this module.
        from .gloo import GlooCollectives

        return GlooCollectives(group)
    return collectives_of(group) or TorchCollectives(group)
