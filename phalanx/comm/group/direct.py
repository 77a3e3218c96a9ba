"""The direct path to a phalanx group: `Collectives` on its gateway, without c10d in between."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..collectives import Collectives, Work
from ..memory.segment import process_memory
from ..shm.transport.signature import ReduceOp
from .gateway import Gateway


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers travel as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class ShmCollectives(Collectives):
    """Collectives of one phalanx group, on tensors of the processor.

    Tensors from `allocate` are reduced where they lie; any other tensor costs a copy each way.
    """

    fuses_scale = True
    names_failures = True
    worthwhile_buckets = 1

    def __init__(self, group: dist.ProcessGroup, gateway: Gateway) -> None:
        self.group = group
        self.rank = gateway.rank
        self.world = gateway.world
        self._gateway = gateway
        self._memory = process_memory()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor in the segment, if `device` is the processor."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._memory.allocate(numel, dtype)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        """Replace `tensor` on every rank by scale × the sum over ranks."""
        return self._gateway.all_reduce((_real(tensor),), ReduceOp.SUM, scale, blocking=False)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        """Give rank r the r-th equal slice of scale × the sum of `input`."""
        return self._gateway.reduce_scatter((_real(output),), (_real(input),), ReduceOp.SUM, scale, blocking=False)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Fill the r-th equal slice of `output` with rank r's `input`."""
        return self._gateway.all_gather((_real(output),), (_real(input),), blocking=False)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Replace `tensor` on every rank by that of rank `source`."""
        return self._gateway.broadcast(_real(tensor), source, blocking=False)
