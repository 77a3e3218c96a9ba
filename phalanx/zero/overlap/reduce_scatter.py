"""The reduction that leaves each rank the mean of its own shard of every bucket, and nothing else.

    stage 1   every bucket has memory of its own; the mean lies in the own shard of it
    stage 2   buckets share memory in turn, as many as may be under way; the mean is used, or kept apart, at once

Knows how slices are reduced. What is done with them, and when, is up to the `SliceTaker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...comm.collectives import Collectives
from ...ddp.bucket import LiveBucket
from ...ddp.reducer import Reducer
from ...ddp.reduction import Mean
from ...errors import ReductionError
from ...plan.shards import UNIT, shard_numel

# Buckets under way at once. In the first stage nothing but time is lost by waiting, so that backward hardly ever waits
# for a bucket; in the second each costs memory.
LAGS = {1: 2, 2: 1}


class SliceTaker(Protocol):
    """Who is given the slices."""

    def begin(self, shadow: bool) -> None:
        """A backward starts."""

    def packed(self, bucket: LiveBucket, place: int) -> None:
        """A local gradient is in the bucket, and needs no memory of its own any more."""

    def sent(self, bucket: LiveBucket) -> None:
        """The local gradients of a bucket are not needed any more."""

    def take(self, bucket: LiveBucket, factor: float, usage: Sequence[int] | None) -> None:
        """The mean of the own slice of a bucket is there, still to be multiplied with `factor`."""


class ReduceScatter(Mean):
    """Reduce-scatter in place of all-reduce. `used_at_once`: the taker is done with a slice when it returns."""

    tail_rides = False

    def __init__(
        self,
        collectives: Collectives,
        reducer: Reducer,
        taker: SliceTaker,
        stage: int,
        used_at_once: bool,
    ) -> None:
        super().__init__(collectives)
        self._reducer = reducer
        self._taker = taker
        self._stage = stage
        self.lag = LAGS[stage]
        self.used_at_once = used_at_once
        self.packs_early = stage == 1
        self._shared: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._kept_apart: dict[int, torch.Tensor] = {}

    # -- memory --------------------------------------------------------------------------------

    @property
    def forgets(self) -> bool:
        """Whether the memory of a slice has another use before the next backward."""
        return self._stage == 2 and self.used_at_once

    def _padded(self, numel: int) -> int:
        return shard_numel(numel, self.collectives.world) * self.collectives.world

    def allocate(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if index == 0:
            self._shared, self._kept_apart = {}, {}
        padded = self._padded(numel)
        if self._stage == 2 and not self.used_at_once:
            # Room for a unit on both sides: the slices at the shard's ends are computed in whole units.
            size = padded // self.collectives.world + 2 * UNIT
            self._kept_apart[index] = torch.zeros(size, dtype=dtype, device=device)
        if self._stage == 1:
            return self.collectives.allocate(padded, dtype, device)
        kind = self._reducer.plan.buckets[index].dtype, self._reducer.plan.buckets[index].device
        alike = [b for b in self._reducer.plan.buckets if (b.dtype, b.device) == kind]
        if (dtype, device) not in self._shared:
            most = max(self._padded(bucket.numel) for bucket in alike)
            count = min(LAGS[2] + 1, len(alike))
            self._shared[dtype, device] = [self.collectives.allocate(most, dtype, device) for _ in range(count)]
        turn = sum(bucket.index < index for bucket in alike) % len(self._shared[dtype, device])
        return self._shared[dtype, device][turn][:padded]

    def own_memory(self, bucket: LiveBucket) -> tuple[torch.Tensor, int]:
        """Memory that holds the own slice once it is reduced, and the place in the bucket of its first element."""
        if bucket.index in self._kept_apart:
            size = bucket.flat.numel() // self.collectives.world
            return self._kept_apart[bucket.index], self.collectives.rank * size - UNIT
        return bucket.flat, 0

    def own(self, bucket: LiveBucket) -> torch.Tensor:
        """The own slice, in the memory that holds it once it is reduced."""
        size = bucket.flat.numel() // self.collectives.world
        memory, origin = self.own_memory(bucket)
        return memory.narrow(0, self.collectives.rank * size - origin, size)

    @property
    def num_bytes(self) -> int:
        """Memory of gradients, in buckets and apart."""
        storages = {bucket.flat.untyped_storage().data_ptr(): bucket.flat for bucket in self._reducer.buckets}
        if self._stage == 2:
            flats = [flat for shared in self._shared.values() for flat in shared]
        else:
            flats = list(storages.values())
        return sum(flat.numel() * flat.element_size() for flat in (*flats, *self._kept_apart.values()))

    # -- the way of a bucket -------------------------------------------------------------------

    def begin(self, shadow: bool) -> None:
        self._taker.begin(shadow)

    def packed(self, bucket: LiveBucket, place: int) -> None:
        self._taker.packed(bucket, place)

    def launch(self, bucket: LiveBucket) -> None:
        self._taker.sent(bucket)
        own = self.own(bucket)
        bucket.work = self.collectives.reduce_scatter(own, bucket.flat, self.transport_scale)

    def give_out(self, bucket: LiveBucket, factor: float, usage: Sequence[int] | None, as_views: bool) -> None:
        self._taker.take(bucket, factor, usage)

    def check_late(self, where: str, buckets: Sequence[LiveBucket]) -> None:
        names = ", ".join(f"bucket {bucket.index} (first parameter '{bucket.names[0]}')" for bucket in buckets)
        raise ReductionError(
            f"{where}: a nested backward brought more gradient to {names} after it had been reduced for "
            "ZeroRedundancyOptimizer(overlap_with_ddp=True), which had used it by then. Use checkpoint(..., "
            "use_reentrant=False), or overlap_with_ddp=False."
        )
