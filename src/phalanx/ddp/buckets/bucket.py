"""A bucket of the plan, and its progress through a pass.

What each slot goes through is in `slot.py`. There are two kinds of buckets with the same verbs, `dense.py` and `sparse.py`,
which do the moving of data that belongs to each transition. Must not know when to launch, nor of other buckets.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...comm.bucket import GradBucket
from ...comm.collectives import Work
from ...plan import Bucket as PlannedBucket
from ...plan import ParamSpec
from ...plan.params import gradient_dtype
from . import slot
from .slot import HELD, LATE
from .tail import Reading, Tail

Scale = float | torch.Tensor  # a number that is known to the host, or one on the device


class Stage(enum.Enum):
    """Where the bucket as a whole is: FILLING -> IN_FLIGHT -> REDUCED -> GIVEN, and FILLING again in the next pass.

    With a late part that was added it is REDUCED once more; of a pass that is given up it is GIVEN, from wherever it was.
    """

    FILLING = enum.auto()
    IN_FLIGHT = enum.auto()
    REDUCED = enum.auto()
    GIVEN = enum.auto()


class Contents(NamedTuple):
    """What a bucket is made of. `part_of`: the bucket of the same slots for which this one carries what came late."""

    planned: PlannedBucket
    specs: Sequence[ParamSpec]
    params: Sequence[torch.nn.Parameter]
    tail: Tail
    tail_rides: bool
    part_of: Bucket | None


class Bucket(abc.ABC):
    """One bucket's slots and its progress through a pass. What moves data is in the two kinds."""

    sparse: bool

    def __init__(self, contents: Contents) -> None:
        planned, specs, params, tail, tail_rides, part_of = contents
        self.part_of = part_of
        self.index = planned.index
        self.is_last = False  # of those that leave: when it has, there is nothing left to do but wait
        self.num_bytes = planned.num_bytes
        self.slots = planned.slots
        self.params = [params[slot.param] for slot in planned.slots]
        self.specs = [specs[slot.param] for slot in planned.slots]
        self.tail = tail
        self.tail_rides = tail_rides
        # What hooks see as the last bucket.
        self.is_last_dense: bool = part_of is not None and part_of.is_last_dense
        self.states = bytearray(len(self.slots))  # of `SlotState`
        self.stage = Stage.FILLING
        # Whose tensor may not be kept when it is taken, and which of them had a gradient when the pass began.
        self._unowned: Sequence[torch.nn.Parameter] = ()
        self._had: list[torch.nn.Parameter] = []
        # Of a pass that is given up, by place: what was HELD when it began, and what was ABSENT when it was taken.
        self._held: Sequence[int] = ()
        self._earlier: set[int] = set()
        # How many gradients have to arrive before the bucket is full, and how many still do.
        self.expected = self.pending = len(self.slots)
        # Set by the strategy that launches the bucket, who also waits for them.
        self.work: Work | None = None
        self.tail_work: Work | None = None
        self.future: torch.futures.Future[Any] | None = None
        self.grad_bucket: GradBucket | None = None
        # What all ranks said in its tail, once it is back; None if everything was as usual.
        self.reading: Reading | None = None

    @property
    @abc.abstractmethod
    def tail_data(self) -> torch.Tensor:
        """Where the tail is written before the bucket leaves, and read when it is back."""

    @abc.abstractmethod
    def take(self, scale: Scale) -> list[int] | None:
        """Bring every gradient, times `scale`, in; returns which of the parameters were used, None for all."""

    @abc.abstractmethod
    def take_nothing(self) -> None:
        """As `take`, for a rank that takes part without gradients of its own: they stay where they are."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Send zeros in place of what was taken."""

    @abc.abstractmethod
    def scale_mean(self, factor: Scale) -> None:
        """Multiply the mean that has come back."""

    @abc.abstractmethod
    def add(self, other: Bucket) -> None:
        """Add the mean of `other`, a bucket of the same slots, to this one's."""

    @abc.abstractmethod
    def give(self, wanted: Sequence[int] | None) -> None:
        """Make the mean the gradient of every parameter in `wanted` (None for all); the others get theirs back."""

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def open(self) -> None:
        """A pass begins: ready to be filled."""
        self.stage = Stage.FILLING
        self.pending = self.expected
        self.reading = None
        slot.open_pass(self.states)
        self._held = [place for place, state in enumerate(self.states) if state == HELD] if HELD in self.states else ()
        self._earlier.clear()

    def hold_back(self) -> None:
        """Expect one gradient more than will arrive: never full before the end of backward."""
        self.expected = len(self.slots) + 1

    def mark_in_flight(self) -> None:
        self.stage = Stage.IN_FLIGHT
        slot.launch(self.states)

    def mark_reduced(self) -> None:
        self.stage = Stage.REDUCED
        slot.reduce(self.states)
        self.work = self.tail_work = self.future = None

    def mark_joined(self) -> None:
        """The mean of what came late has been added, perhaps after the first had been given out."""
        self.stage = Stage.REDUCED
        slot.join_late(self.states)

    @property
    def is_late(self) -> bool:
        """Whether gradient has come for one of its slots after the bucket had left."""
        return self.stage is not Stage.FILLING and LATE in self.states

    def note_gradients(self) -> None:
        """Nothing has been taken yet: remember whose gradient may be freed when it is."""
        self._had = [param for param in self._unowned if param.grad is not None]

    def replace_lost(self) -> None:
        """The pass was given up: whoever had a gradient when it began has one, as on ranks that came less far."""
        for param in self._had:
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=gradient_dtype(param), requires_grad=False)

    def abandon(self) -> None:
        """The pass is given up. Owners get their tensors back at once, so that zeroing them now has an effect.

        What is in flight stays the transport's: the slots of such a bucket are released by `release`.
        """
        if self.stage is not Stage.IN_FLIGHT:
            self.release()

    def release(self) -> None:
        """Nothing of a pass that was given up is in flight any more."""
        slot.abandon(self.states, self._earlier)
        self.stage = Stage.GIVEN
        self.work = self.tail_work = self.future = None

    def hold_again(self) -> None:
        """Zeros have been sent in place of what this rank has, which is still to be reduced."""
        for place in self._held:
            slot.hold(self.states, place)


def multiplies(scale: Scale) -> bool:
    """Whether it is worth a pass over memory. Of a number on a device nobody asks what it is."""
    return isinstance(scale, torch.Tensor) or scale != 1.0
