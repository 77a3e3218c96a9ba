"""The c10d backend "phalanx": a process group whose collectives go through shared memory.

What is not accelerated is handed to an inner gloo group, so whatever works on gloo works here.
Importing this module registers the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Collectives
from phalanx.comm.shm.assembly import assemble
from phalanx.comm.shm.direct import ShmCollectives
from phalanx.comm.shm.gateway import Gateway
from phalanx.comm.shm.reduction import Reduction


class PhalanxProcessGroup(dist.ProcessGroup):
    """See the module."""

    def __init__(self, store: dist.Store, rank: int, world: int, names: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, world)
        engine = assemble(dist.PrefixStore("phalanx", store), rank, world, names, timeout)
        self.gateway = Gateway(engine, timeout, str(rank))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return self.gateway.all_reduce(tensors[0], Reduction.SUM, 1.0, not opts.asyncOp)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return self.gateway.broadcast(tensors[0], opts.rootRank, not opts.asyncOp)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.gateway.barrier(True)

    def shutdown(self) -> None:
        self.gateway.close()

    def getBackendName(self) -> str:
        return "phalanx"


def collectives_of(group: dist.ProcessGroup) -> Collectives | None:
    """The direct path to `group` if it is a phalanx group, else None."""
    return ShmCollectives(group, group.gateway) if isinstance(group, PhalanxProcessGroup) else None


def _create(options: Any, _: Any) -> PhalanxProcessGroup:
    return PhalanxProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.global_ranks_in_group or range(options.group_size),
        options.timeout,
    )


if "PHALANX" not in dist.Backend._plugins:
    dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
