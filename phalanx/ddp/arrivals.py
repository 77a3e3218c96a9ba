"""Which gradients have arrived: in this backward pass, in earlier ones not yet reduced, and how often.

The hot path writes to these arrays directly. Must not know of launching or of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bucket import LiveBucket, Stage


class Arrivals:
    """One flag a parameter and question. `observing` is true until the first reduced pass has ended."""

    def __init__(self, num_params: int) -> None:
        self.observing = True
        self.looks_static = True  # every reduced pass so far used the same parameters
        self.fired = bytearray(num_params)  # got a gradient in this pass
        self.carried = bytearray(num_params)  # got one in an earlier pass that was not reduced
        self.often = bytearray(num_params)  # has ever got several in one pass
        self.late: set[int] = set()  # buckets that got a gradient after they had left
        self.nested = False  # this pass has a backward inside the backward
        self.nested_somewhere = False  # some rank had one in some earlier pass
        self.sequence: list[int] = []  # every gradient of the observed pass, in order
        self.first_used = b""  # what the observed pass used
        self.static_used: bytes | None = None  # what every pass uses, by promise

    @property
    def surprised(self) -> bool:
        """Whether a backward inside the backward is something that no rank has seen before."""
        return self.nested and not self.nested_somewhere

    def again(self, index: int, bucket: LiveBucket, as_views: bool) -> None:
        """More gradient for the same parameter in one pass: only nested backwards do this."""
        self.often[index] = 1
        self.nested = True
        place = bucket.place_of(index)
        if bucket.stage is not Stage.FILLING or ((as_views or bucket.lent[place]) and bucket.packed[place]):
            self.late.add(bucket.index)
        bucket.packed[place] = 0

    def usage(self, bucket: LiveBucket) -> list[int] | None:
        """Which of the bucket's parameters this rank used since the last reduction; None for all."""
        if self.static_used is not None:
            used = [self.static_used[slot.param] for slot in bucket.slots]
        elif not bucket.pending:
            return None
        else:
            used = [self.fired[slot.param] | self.carried[slot.param] for slot in bucket.slots]
        return None if all(used) else used

    def close(self) -> None:
        """The pass has ended, reduced or given up."""
        if self.static_used is None:
            # One operation on two long integers: as bytes, this would be Python work for each parameter.
            union = int.from_bytes(self.fired, "little") | int.from_bytes(self.carried, "little")
            used = union.to_bytes(len(self.fired), "little")
            if not self.first_used:
                self.first_used = used
            elif self.looks_static:
                self.looks_static = used == self.first_used
        self.fired[:] = bytes(len(self.fired))
        self.carried[:] = bytes(len(self.carried))
        self.late.clear()
        self.nested = False

    def keep(self, kept: Sequence[int]) -> Arrivals:
        """The same knowledge about a subset of the parameters, renumbered."""
        renumber = {old: new for new, old in enumerate(kept)}
        rest = Arrivals(len(kept))
        rest.observing = self.observing
        rest.nested_somewhere = self.nested_somewhere
        rest.often = bytearray(self.often[index] for index in kept)
        rest.sequence = [renumber[index] for index in self.sequence if index in renumber]
        rest.first_used = bytes(self.first_used[index] for index in kept)
        return rest
