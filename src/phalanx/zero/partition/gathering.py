"""Parameters on their way back to all ranks: launched bucket by bucket, finished in the same order.

Owns the scratch memory through which parameters travel that lie in memory of their own: two buffers per dtype
and device, so that one bucket is packed while another is in flight. Must not know of the optimizer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ...comm.collectives import Collectives, Work
from ...observe import trace
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

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        # Oldest first. What was launched first is finished first, on every rank, whichever arrives first.
        self._pending: deque[_Flight] = deque()
        self._sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        self._buffers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        # How often a buffer of this kind was handed out: the next one is that which was used longest ago.
        self._taken: dict[tuple[torch.dtype, torch.device], int] = {}
        # Of shared parameters, which are in place as soon as all ranks have written.
        self._written: list[Shard] = []

    def provide(self, shards: list[Shard]) -> None:
        """Be ready for these shards. Memory is taken when the first is launched: many partitions are never stepped."""
        self.finish()
        self._buffers, self._taken, self._sizes = {}, {}, {}
        for shard in shards:
            if shard.flat is None:
                key = (shard.bucket.dtype, shard.device)
                self._sizes[key] = max(self._sizes.get(key, 0), shard.shard_numel * self.collectives.world)

    def _next_buffer(self, key: tuple[torch.dtype, torch.device]) -> torch.Tensor:
        if key not in self._buffers:
            dtype, device = key
            self._buffers[key] = [self.collectives.allocate(self._sizes[key], dtype, device) for _ in range(_NUM_BUFFERS)]
            self._taken[key] = 0
        self._taken[key] += 1
        return self._buffers[key][self._taken[key] % _NUM_BUFFERS]

    def launch(self, shard: Shard) -> None:
        """Start gathering the shard's bucket; finishes older ones first if memory is short."""
        if shard.is_shared:
            self._written.append(shard)
            return
        buffer = scratch = None
        if shard.flat is None:
            buffer = self._next_buffer((shard.bucket.dtype, shard.device))
            # The bucket that used it before must be copied out of it before another is packed into it.
            while any(flight.buffer is buffer for flight in self._pending):
                self._finish_oldest()
            scratch = buffer[: shard.shard_numel * self.collectives.world]
        started_ns = trace.now_ns()
        work = shard.launch_gather(self.collectives, scratch)
        self._pending.append(_Flight(shard, work, buffer, scratch, started_ns))

    def finish(self) -> None:
        """Return when every parameter launched so far is equal on all ranks."""
        while self._pending:
            self._finish_oldest()
        # Shared parameters are not gathered: when all ranks are here, all have written their shards in place.
        if self._written:
            self.barrier()
            for shard in self._written:
                shard.remember_writes()
            self._written.clear()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.collectives.barrier("a barrier around shared parameters")

    def _finish_oldest(self) -> None:
        flight = self._pending.popleft()
        shard = flight.shard
        self.collectives.wait(flight.work, f"gathering the parameters of bucket {shard.index}")
        shard.finish_gather(flight.scratch)
        if trace.recorder is not None:
            attributes = {"bucket": shard.index, "bytes": shard.bucket.num_bytes}
            trace.recorder.span(trace.GATHER, flight.started_ns, trace.now_ns(), **attributes)
