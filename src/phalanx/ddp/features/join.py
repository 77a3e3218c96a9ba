"""Uneven inputs: what a rank that has run out of them does so that the others can go on.

On each iteration of the ranks still training, a joined rank matches their collectives with nothing to
give. Its weight in the mean is 1 (division by the initial world) or 0 (by the ranks still training).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ...comm.torch_backend import started
from .buffers import BufferHookLocation

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


def common_rank(ddp: DistributedDataParallel, candidate: bool) -> int:
    """The highest rank that is a candidate; every rank of the group calls this."""
    mine = ddp.collectives.rank if candidate else -1
    choice = torch.tensor([mine], dtype=torch.int64, device=ddp.device)
    work = dist.all_reduce(choice, op=dist.ReduceOp.MAX, group=ddp.process_group, async_op=True)
    ddp.collectives.wait(started(work, choice), "agreeing on a rank to synchronise from")
    return int(choice.item())


def announce_reduction(ddp: DistributedDataParallel, reduces: bool) -> bool:
    """Whether any training rank will reduce its next backward; ranks training and joined call this."""
    # Its type is said: a script may set another default on one rank, after the model was made.
    flag = torch.tensor([float(reduces)], dtype=torch.float32, device=ddp.device)
    ddp.collectives.wait(ddp.collectives.all_reduce(flag), "telling joined ranks about the next backward")
    return bool(flag.item())


class JoinedTraining(JoinHook):
    """Matches the collectives of one wrapper's forward and backward."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        # Before any collective of join's own, in which a rank without a single input would meet the others' first.
        ddp.reducer.recover()
        # What a forward would find out, and a rank without a single input runs none.
        ddp.follow_moved_parameters()
        # A rank without a single input steps in backward too, and is compared with the others like any.
        ddp._adopt_in_backward_optimizers()
        # Here, and not only in the wrapper's own `join`: torch's `Join` takes it as well.
        divides = {"divide_by_initial_world_size": str(divide_by_initial_world_size)}
        ddp.collectives.agree("the arguments of join", divides)
        ddp._has_joined = True
        self._weight = None if divide_by_initial_world_size else 0.0

    def main_hook(self) -> None:
        ddp = self._ddp
        ddp.verify()  # this rank's last step of its own
        if ddp.will_sync_module_buffers() and ddp.buffer_sync.due(BufferHookLocation.PRE_FORWARD):
            ddp.buffer_sync.run(ddp.collectives, common_rank(ddp, False))
        reduces = announce_reduction(ddp, False)
        if ddp.will_sync_module_buffers() and ddp.buffer_sync.due(BufferHookLocation.POST_FORWARD):
            ddp.buffer_sync.run(ddp.collectives, common_rank(ddp, False))
        # A forward that is not reduced is followed by one that does not synchronise buffers either.
        ddp.require_forward_param_sync = reduces
        if reduces:
            ddp.reducer.join_others(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._ddp.verify()  # before one rank's model becomes everybody's
        source = common_rank(self._ddp, is_last_joiner)
        self._ddp.replicate_module(source, self._ddp.forward_sync_buffers)
        self._ddp._authoritative_rank = source
