"""The strategy that leaves each rank the mean of its own shard of every bucket, and nothing else.

    stage 1   every bucket has memory of its own; the mean lies in the own shard of it
    stage 2   buckets share memory in turn, as many as may be under way; the mean is used, or kept apart, at once

Knows how slices are reduced. What is done with them is up to a listener, by `bucket_given`: `overlap.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ...comm.collectives import Collectives
from ...ddp.buckets.bucket import Bucket, Scale
from ...ddp.buckets.dense import DenseBucket
from ...ddp.reducer import Mean, Reducer
from ...plan.shards import UNIT, shard_numel

# Buckets under way at once. In the first stage nothing but time is lost by waiting, so that backward hardly ever waits
# for a bucket; in the second each costs memory.
LAGS = {1: 2, 2: 1}


class ReduceScatter(Mean):
    """Reduce-scatter in place of all-reduce. `used_at_once`: the listener is done with a slice when it returns."""

    tail_rides = False

    def __init__(self, collectives: Collectives, reducer: Reducer, stage: int, used_at_once: bool) -> None:
        super().__init__(collectives)
        self._reducer = reducer
        self._stage = stage
        self.lag = LAGS[stage]
        self.gives_for_good = self.used_at_once = used_at_once
        self.packs_on_arrival = stage == 1
        self._shared: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._kept_apart: dict[int, torch.Tensor] = {}
        # Means that are back and not used yet, whose memory another bucket takes over. Only in passes that are nested.
        self._set_aside: dict[int, torch.Tensor] = {}

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
            # A bucket is packed when the one `lag` before it has been given out, on every rank: its memory is free then.
            count = min(LAGS[2], len(alike))
            self._shared[dtype, device] = [self.collectives.allocate(most, dtype, device) for _ in range(count)]
        turn = sum(bucket.index < index for bucket in alike) % len(self._shared[dtype, device])
        return self._shared[dtype, device][turn][:padded]

    def allocate_late(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.collectives.allocate(self._padded(numel), dtype, device)

    def own_memory(self, bucket: DenseBucket) -> tuple[torch.Tensor, int]:
        """Memory that holds the own slice once it is reduced, and the place in the bucket of its first element."""
        size = bucket.flat.numel() // self.collectives.world  # which allocates both, the first time
        if bucket.index in self._kept_apart and bucket.part_of is None:
            return self._kept_apart[bucket.index], self.collectives.rank * size - UNIT
        return bucket.flat, 0

    def own(self, bucket: DenseBucket) -> torch.Tensor:
        """The own slice, in the memory that holds it once it is reduced."""
        size = bucket.flat.numel() // self.collectives.world
        memory, origin = self.own_memory(bucket)
        return memory.narrow(0, self.collectives.rank * size - origin, size)

    @property
    def num_bytes(self) -> int:
        """Memory of gradients, in buckets and apart."""
        buckets = [cast("DenseBucket", bucket) for bucket in self._reducer.buckets]
        storages = {bucket.flat.untyped_storage().data_ptr(): bucket.flat for bucket in buckets}
        if self._stage == 2:
            flats = [flat for shared in self._shared.values() for flat in shared]
        else:
            flats = list(storages.values())
        return sum(flat.numel() * flat.element_size() for flat in (*flats, *self._kept_apart.values()))

    # -- the way of a bucket -------------------------------------------------------------------

    def launch(self, bucket: DenseBucket) -> None:
        bucket.work = self.collectives.reduce_scatter(self.own(bucket), bucket.flat, self.transport_scale)

    def scale_mean(self, bucket: Bucket, factor: Scale) -> None:
        self.own(cast("DenseBucket", bucket)).mul_(factor)

    def keep(self, bucket: DenseBucket) -> None:
        if self.forgets and bucket.index not in self._set_aside:
            self._set_aside[bucket.index] = self.own(bucket).clone()

    def join_late(self, bucket: Bucket, late: Bucket) -> None:
        mean = self._set_aside.get(bucket.index, self.own(cast("DenseBucket", bucket)))
        mean.add_(self.own(cast("DenseBucket", late)))

    def give(self, bucket: Bucket, wanted: Sequence[int] | None) -> None:
        """Nothing becomes a gradient: whoever hears of it by `bucket_given` takes the slice."""
        if bucket.index in self._set_aside:
            # Everything is back, so that the memory which the buckets share is free for one after the other.
            self.own(cast("DenseBucket", bucket)).copy_(self._set_aside.pop(bucket.index))
