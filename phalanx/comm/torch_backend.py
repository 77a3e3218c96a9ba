"""Collectives over any c10d process group: gloo, nccl, mpi, ucc, or one registered by others.

Adds nothing to the transport. Must not know of gradients, buckets or steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .collectives import Collectives, Work


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers travel as pairs of reals: c10d backends add only reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _slice(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = tensor.numel() // world
    return tensor.narrow(0, rank * size, size)


class TorchCollectives(Collectives):
    """Collectives by the public functions of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # Scaling first keeps half-precision sums in range, whatever the number of ranks.
            tensor.mul_(scale)
        return dist.all_reduce(_real(tensor), group=self.group, async_op=True)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            input.mul_(scale)
        return dist.reduce_scatter_single(_real(output), _real(input), group=self.group, async_op=True)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return dist.all_gather_single(_real(output), _real(input), group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return dist.broadcast(_real(tensor), group=self.group, group_src=source, async_op=True)


def collectives_for(group: dist.ProcessGroup) -> Collectives:
    """The fastest collectives that this group offers."""
    return TorchCollectives(group)
