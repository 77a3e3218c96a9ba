"""How many bytes each rank holds, by kind, and how many it would hold if nothing were sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..observe import trace
from .overlap.gradient_shards import ScatteredGradient
from .partition.element import Placement
from .state.sharded_optimizer import ShardedOptimizer

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank."""

    state: int
    gradients: int
    parameters: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.state + self.gradients + self.parameters


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """`ranks` by number; `unsharded` is what every rank would hold with the plain optimizer."""

    ranks: tuple[RankMemory, ...]
    unsharded: RankMemory

    def __str__(self) -> str:
        lines = [f"{'':>10} {'state':>10} {'gradients':>10} {'parameters':>11} {'total':>10}  MiB"]
        rows = [*((f"rank {rank}", row) for rank, row in enumerate(self.ranks)), ("unsharded", self.unsharded)]
        for name, row in rows:
            lines.append(
                f"{name:>10} {row.state / _MIB:>10.2f} {row.gradients / _MIB:>10.2f} "
                f"{row.parameters / _MIB:>11.2f} {row.total / _MIB:>10.2f}"
            )
        return "\n".join(lines)


def report_memory(sharded: ShardedOptimizer, bucket_bytes: int) -> MemoryReport:
    """Ask every rank; `bucket_bytes` are gradients in buckets. Every rank calls it and gets the same report."""
    params = sharded.table.params
    device = params[0].device
    state = sharded.local.num_state_bytes
    gradients = bucket_bytes + sum(_gradient_bytes(param) for param in params)
    parameters = sum(_bytes(param) for param in params)
    # One copy for all ranks: each has its part of it.
    held = parameters // sharded.collectives.world if sharded.placement is Placement.SHARED else parameters
    # On the parameters' device: the group of an accelerator takes no CPU tensor.
    mine = torch.tensor([state, gradients, held], dtype=torch.int64, device=device)
    everyone = torch.zeros(3 * sharded.collectives.world, dtype=torch.int64, device=device)
    sharded.collectives.wait(sharded.collectives.all_gather(everyone, mine), "asking for memory")
    ranks = tuple(RankMemory(*row) for row in everyone.view(-1, 3).tolist())
    # Without sharding every rank would hold all state, and a gradient of each parameter that has one.
    trained = sum(_bytes(param) for param in params if param.requires_grad)
    report = MemoryReport(ranks, RankMemory(sum(row.state for row in ranks), trained, parameters))
    trace.fact(trace.MEMORY, {"state": state, "gradients": gradients, "parameters": held})
    return report


def _gradient_bytes(param: torch.Tensor) -> int:
    grad = param.grad
    # It has no memory of its own. What it may carry is local gradient that waits for the next reduction.
    if isinstance(grad, ScatteredGradient):
        grad = grad.pending
    return 0 if grad is None else _bytes(grad)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
