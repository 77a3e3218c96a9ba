"""Collectives over any c10d process group: gloo, nccl, mpi, ucc, or one registered by others.

Adds nothing to the transport. Must not know of gradients, buckets or steps.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collectives, Work, as_real
from .failure.agreement import StoreAgreement, agreement_of
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

    def _launches(self, verb: str, tensor: torch.Tensor, root: int = -1) -> None:
        """Compare the first collective of each kind with that of the other ranks: the transport would not."""
        # Rows of sparse gradients travel as words of 64 bits, in sizes that the ranks have just told each other.
        if self.world > 1 and tensor.dtype is not torch.int64:
            self._agreement.launches(verb, tensor, root, self._nobody_comes)

    @cached_property
    def _agreement(self) -> StoreAgreement:
        return agreement_of(self.board)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return zeros_in_pages(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # Scaling first keeps half-precision sums in range, whatever the number of ranks.
            tensor.mul_(scale)
        self._launches("all_reduce", tensor)
        return _started(dist.all_reduce(as_real(tensor), group=self.group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # In place, which `Collectives` allows: a copy would cost a pass over memory and the memory itself.
            input.mul_(scale)
        self._launches("reduce_scatter", input)
        return _started(
            dist.reduce_scatter_single(as_real(output), as_real(input), group=self.group, async_op=True)
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        self._launches("all_gather", output)
        return _started(dist.all_gather_single(as_real(output), as_real(input), group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._launches("broadcast", tensor, source)
        return self._broadcast(tensor, source)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return _started(dist.broadcast(as_real(tensor), group=self.group, group_src=source, async_op=True))


def collectives_for(group: dist.ProcessGroup) -> Collectives:
    """The fastest collectives that this group offers."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        # Here and not above: GlooCollectives derives from the class in this module.
        from .gloo import GlooCollectives

        return GlooCollectives(group)
    return collectives_of(group) or TorchCollectives(group)
