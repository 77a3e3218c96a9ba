"""The leads: one rank a host, which talk to each other over gloo for all ranks of their hosts.

Hosts are numbered; the lead of host h is rank h of the leads' gloo group. A call that fails raises
`LeadsError` with gloo's own words, which say nothing of ranks: who is to blame is found out by the
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
)

from ...errors import CommunicationError
from ..shm.gloo import CuttableGloo
from ..shm.reduction import Reduction

_OPERATIONS: dict[Reduction, Any] = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.BAND: dist.ReduceOp.BAND,
    Reduction.BOR: dist.ReduceOp.BOR,
    Reduction.BXOR: dist.ReduceOp.BXOR,
}
_TAG = 0


class LeadsError(CommunicationError):
    """gloo could not finish a call between the hosts."""


class Leads:
    """The leads of a group, as one of them sees them."""

    def __init__(self, store: dist.Store, host: int, num_hosts: int, timeout: timedelta) -> None:
        self.host = host
        self.num_hosts = num_hosts
        self._lines = CuttableGloo(store, host, num_hosts, timeout)
        self._gloo = self._lines.backend

    def barrier(self, timeout: timedelta) -> None:
        """Return when all leads have called this."""
        options = BarrierOptions()
        options.timeout = timeout
        self._finish([lambda: self._gloo.barrier(options)], timeout)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, timeout: timedelta) -> None:
        """Replace `tensor` by the reduction over hosts."""
        options = AllreduceOptions()
        options.timeout = timeout
        options.reduceOp = _OPERATIONS[reduction]
        wire = _as_gloo_takes_it(tensor)
        self._finish([lambda: self._gloo.allreduce([wire], options)], timeout)
        if wire is not tensor:
            tensor.copy_(wire)

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, timeout: timedelta) -> None:
        """Replace `tensor` on the lead of host `root` by the reduction over hosts."""
        options = ReduceOptions()
        options.timeout = timeout
        options.rootRank = root
        options.reduceOp = _OPERATIONS[reduction]
        wire = _as_gloo_takes_it(tensor)
        self._finish([lambda: self._gloo.reduce([wire], options)], timeout)
        if wire is not tensor and root == self.host:
            tensor.copy_(wire)

    def broadcast(self, data: torch.Tensor, root: int, timeout: timedelta) -> None:
        """Replace `data`, which are bytes, by that of the lead of host `root`."""
        options = BroadcastOptions()
        options.timeout = timeout
        options.rootRank = root
        self._finish([lambda: self._gloo.broadcast([data], options)], timeout)

    def exchange(
        self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor], timeout: timedelta
    ) -> None:
        """Fill `received[h]` with what host h has in `given[host]`; both are bytes, of any sizes."""
        others = [host for host in range(self.num_hosts) if host != self.host]

        def receive(host: int) -> Callable[[], Any]:
            return lambda: self._gloo.recv([received[host]], host, _TAG)

        def give(host: int) -> Callable[[], Any]:
            return lambda: self._gloo.send([given[host]], host, _TAG)

        starts = [receive(host) for host in others if received[host].numel()]
        starts += [give(host) for host in others if given[host].numel()]
        self._finish(starts, timeout)

    def cut(self) -> None:
        """Cut the connections, so that whatever waits on them, here or on another host, raises."""
        self._lines.cut()

    def _finish(self, starts: Sequence[Callable[[], Any]], timeout: timedelta) -> None:
        try:
            works = [start() for start in starts]
            for work in works:
                work.wait(timeout)
        except RuntimeError as error:
            raise LeadsError(str(error)) from error


def _as_gloo_takes_it(tensor: torch.Tensor) -> torch.Tensor:
    # gloo has no 16-bit integers.
    return tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
