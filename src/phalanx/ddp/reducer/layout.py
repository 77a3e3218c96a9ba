"""Where each gradient goes: the buckets of one plan, as memory.

Replaced whole when another plan, strategy or dtype is adopted, so that nothing of an old plan outlives it. Owns the
buckets, and they their memory. Must not know of passes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from ...plan import Bucket as PlannedBucket
from ...plan import BucketPlan
from ..buckets import slot
from ..buckets.bucket import Bucket, Contents
from ..buckets.dense import DenseBucket
from ..buckets.sparse import SparseBucket
from ..buckets.tail import Tail, exact_ranks
from .strategy import Strategy

_HALVES = (torch.float16, torch.complex32)  # which a gradient times a number of tokens does not fit


class Layout:
    """The buckets of `plan`, whose memory `strategy` chooses, and by parameter its bucket and its place in it.

    `number` tells wrappers of one plan apart, in what their tails say.
    """

    def __init__(
        self, plan: BucketPlan, params: Sequence[torch.nn.Parameter], strategy: Strategy, number: int, as_views: bool
    ) -> None:
        self.plan = plan
        self._params, self._strategy, self._number, self._as_views = params, strategy, number, as_views
        self.buckets: list[Bucket] = [self._make(planned, self._tail_of(planned)) for planned in plan.buckets]
        for last in [bucket for bucket in self.buckets if not bucket.sparse][-1:]:
            last.is_last_dense = True
        self.buckets[-1].is_last = True
        where = {each.param: (bucket, place) for bucket in self.buckets for place, each in enumerate(bucket.slots)}
        self.places: list[tuple[Bucket, int]] = [where[index] for index in range(len(params))]
        self.is_large = bytearray(len(params))  # by parameter, whether its gradient is packed as soon as it arrives
        self.has_halves = any(planned.dtype in _HALVES for planned in plan.buckets)
        self.on_device = any(param.device.type != "cpu" for param in params)

    # -- making buckets ------------------------------------------------------------------------

    def _tail_of(self, planned: PlannedBucket) -> Tail:
        num_late = len(self.plan.buckets) if planned.index == len(self.plan.buckets) - 1 else 0
        scale = self._strategy.transport_scale if self._tail_rides(planned) and not planned.sparse else 1.0
        signature = f"{self._number}/{self.plan.hash}/{planned.index}"
        return Tail(signature, len(planned.slots), num_late, self._strategy.collectives.world, scale)

    def _tail_rides(self, planned: PlannedBucket) -> bool:
        may_ride = planned.sparse or self._strategy.collectives.world <= exact_ranks(planned.dtype)
        return self._strategy.tail_rides and may_ride

    def _make(self, planned: PlannedBucket, tail: Tail, part_of: Bucket | None = None) -> Bucket:
        contents = Contents(planned, self.plan.specs, self._params, tail, self._tail_rides(planned), part_of)
        if planned.sparse:
            return SparseBucket(contents)
        if part_of is not None:
            return DenseBucket(contents, self._strategy.allocate_late, False)
        return DenseBucket(contents, partial(self._strategy.allocate, planned.index), self._as_views)

    def late_part_of(self, bucket: Bucket) -> Bucket:
        """A bucket for what came late for this one."""
        return self._make(self.plan.buckets[bucket.index], bucket.tail.of_late_parts(), bucket)

    # -- what parameters ask for ---------------------------------------------------------------

    def choose_large(self, repeats: Sequence[int], shared: Collection[int]) -> None:
        """Which gradients are packed on arrival: not those of which more may come, nor `shared` ones, of others too."""
        for index, ((bucket, place), param) in enumerate(zip(self.places, self._params, strict=True)):
            waits = repeats[index] or id(param) in shared
            self.is_large[index] = isinstance(bucket, DenseBucket) and bucket.large[place] and not waits

    def hold_back(self, index: int) -> None:
        """More gradient may come for a parameter in one pass: packed on arrival, the second part would always be late."""
        self.is_large[index] = 0
        self.places[index][0].hold_back()

    def hold(self, params: Collection[int]) -> None:
        """These, by identity, have gradient that no pass has reduced."""
        for param, (bucket, place) in zip(self._params, self.places, strict=True):
            if id(param) in params:
                slot.hold(bucket.states, place)

    def drop(self) -> set[int]:
        """Let go of the buckets; the parameters, by identity, with gradient that no pass has reduced.

        By identity: parameters may have got other numbers since, of those that were left out or are back.
        """
        held = {
            id(param)
            for bucket in self.buckets
            for param, state in zip(bucket.params, bucket.states, strict=True)
            if state == slot.HELD
        }
        self.buckets, self.places = [], []
        return held
