"""Parameters on their way back to all ranks: launched bucket by bucket, finished in the same order.

Owns the scratch memory through which parameters travel that lie in memory of their own: two buffers a dtype
and device, so that one bucket is packed while another is in flight. Must not know of the optimizer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ..comm.collectives import Collectives, Work
from ..comm.patience import Patience
from ..observe import trace
from .shard import Shard

_NUM_BUFFERS = 2


@dataclass(slots=True)
class _Flight:
    shard: Shard
    work: Work
    buffer: torch.Tensor | None
    scratch: torch.Tensor | None
    started_ns: int


class Gathering:
    """The gathers of one optimizer. Every rank launches the same ones in the same order."""

    def __init__(self, collectives: Collectives, patience: Patience) -> None:
        self.collectives = collectives
        self.patience = patience
        self._pending: deque[_Flight] = deque()
        self._buffers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._taken: dict[tuple[torch.dtype, torch.device], int] = {}

    def provide(self, shards: list[Shard]) -> None:
        """Have the scratch memory that these shards need; what others needed is given back."""
        self.finish()
        self._buffers, self._taken = {}, {}
        most: dict[tuple[torch.dtype, torch.device], int] = {}
        for shard in shards:
            if shard.flat is None:
                kind = (shard.bucket.dtype, shard.device)
                most[kind] = max(most.get(kind, 0), shard.slice_numel * self.collectives.world)
        for (dtype, device), numel in most.items():
            buffers = [self.collectives.allocate(numel, dtype, device) for _ in range(_NUM_BUFFERS)]
            self._buffers[dtype, device] = buffers
            self._taken[dtype, device] = 0

    def launch(self, shard: Shard) -> None:
        """Start gathering the shard's bucket; finishes older ones first if memory is short."""
        buffer = scratch = None
        if shard.flat is None:
            kind = (shard.bucket.dtype, shard.device)
            buffer = self._buffers[kind][self._taken[kind] % _NUM_BUFFERS]
            self._taken[kind] += 1
            while any(flight.buffer is buffer for flight in self._pending):
                self._finish_oldest()
            scratch = buffer[: shard.slice_numel * self.collectives.world]
        started_ns = trace.now_ns()
        work = shard.launch_gather(self.collectives, scratch)
        self._pending.append(_Flight(shard, work, buffer, scratch, started_ns))

    def finish(self) -> None:
        """Return when every parameter launched so far is equal on all ranks."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flight = self._pending.popleft()
        shard = flight.shard
        self.patience.wait(flight.work, f"gathering the parameters of bucket {shard.index}")
        shard.finish_gather(flight.scratch)
        if trace.recorder is not None:
            attributes = {"bucket": shard.index, "bytes": shard.bucket.num_bytes}
            trace.recorder.span(trace.GATHER, flight.started_ns, trace.now_ns(), **attributes)
