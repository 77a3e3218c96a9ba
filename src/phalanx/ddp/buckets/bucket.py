"""A bucket of the plan: its progress through a pass, its memory, and the question who else holds a piece of memory.

What each slot goes through is in `slot.py`. There are two kinds of buckets with the same verbs, `dense.py` and `sparse.py`,
which do the moving of data that belongs to each transition.

`.grad` after backward is promised to be memory that nothing overwrites behind the user's back. A copy keeps that
promise; so does the bucket's own memory, as long as the bucket takes other memory when a tensor of it is still held at
the next pass. Who holds what is read off reference counts, exactly and without a pass over memory.
Must not know when to launch, nor of other buckets.
"""

from __future__ import annotations

import abc
import enum
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...comm.bucket import GradBucket
from ...comm.collectives import Work
from ...plan import Bucket as PlannedBucket
from ...plan import ParamSpec, Slot
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
        self.num_bytes = planned.num_bytes
        self.slots = planned.slots
        self.params = [params[slot.param] for slot in planned.slots]
        self.specs = [specs[slot.param] for slot in planned.slots]
        self._kinds = self._current_kinds
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
    def is_outdated(self) -> bool:
        """Whether the user has given the parameters another dtype or device since the bucket was made."""
        return self._current_kinds != self._kinds

    @property
    def _current_kinds(self) -> tuple[list[torch.dtype], torch.device]:
        # `gradient_dtype`, without a call per parameter: this is asked before each forward.
        return [param.grad_dtype or param.dtype for param in self.params], self.params[0].device

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

    def write_tail(self, step: int, used: Sequence[int] | None, weight: float | None) -> None:
        """What this rank has to say beside its gradients; None for what is as usual."""
        self.tail.write(self.tail_data, step)
        if used is not None:
            self.tail.write_usage(self.tail_data, used)
        if weight is not None:
            self.tail.write_weight(self.tail_data, weight)

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


# -- memory ----------------------------------------------------------------------------------------


def references(memory: torch.Tensor) -> int:
    """How many tensors (and storage objects) share the memory of `memory`."""
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))


def _counts(held: list[torch.Tensor | None], place: int) -> tuple[int, int, int]:
    """References to the Python object, to the tensor, and to its memory, seen through the list that holds it."""
    tensor = held[place]
    assert tensor is not None, "asked only of tensors that are there"
    # Private: only this call counts holders in C++ (a graph that saved it, say). A test notices if it moves.
    used: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), used, references(tensor)


# What these counts are for a tensor that only its list holds is a matter of the interpreter and of torch's version.
_ALONE = _counts([torch.zeros(1)], 0)


def is_unshared(held: list[torch.Tensor | None], place: int) -> bool:
    """Whether the list is all that holds this tensor and its memory: then nobody can tell if it is gone.

    The tensor must have been taken off its parameter before. A subclass or a part of a graph is never ours to free, nor is
    memory that torch did not allocate (numpy's, DLPack's, a file's) or that other processes see.
    """
    tensor = held[place]
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return False
    if not tensor.untyped_storage().resizable() or tensor.is_shared():
        return False
    del tensor  # it would count
    return _counts(held, place) == _ALONE


def is_same(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether both name the same values in the same memory (autograd may hand out a new tensor object)."""
    return (
        grad.layout == torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.stride() == view.stride()
        and grad.numel() > 0
        and grad.is_conj() == view.is_conj()  # `p.grad = p.grad.conj()` names the same memory for other values
    )


class BucketMemory:
    """`body`: the gradients; `views`: each of them in its parameter's shape; `tail`: what rides behind them.

    `shown` are the tensors that become `.grad` in view mode. They are others than `views`, because a user may move a
    gradient elsewhere (`Module.to` assigns its `.data`), and the bucket must go on naming its own memory.
    """

    __slots__ = ("_own_references", "body", "flat", "is_loaned", "shown", "tail", "views")

    def __init__(
        self,
        flat: torch.Tensor,
        slots: Sequence[Slot],
        specs: Sequence[ParamSpec],
        tail: torch.Tensor | None,
        tail_numel: int,
        as_views: bool,
    ) -> None:
        """`flat` may be longer than body and tail. `tail` is given where it does not ride behind the body."""
        numel = sum(slot.numel for slot in slots)
        self.flat = flat
        self.body = flat.narrow(0, 0, numel)
        self.tail = flat.narrow(0, numel, tail_numel) if tail is None else tail
        origin = self.body.storage_offset()
        self.views = [
            self.body.as_strided(spec.shape, spec.stride, origin + slot.offset)
            for slot, spec in zip(slots, specs, strict=False)
        ]
        self.shown = [view.detach() for view in self.views] if as_views else []
        self.is_loaned = False  # whether a part of it has been given out as a loan
        # Last, when everything of ours that names this memory exists: a count too high would hide one holder.
        self._own_references = references(flat)

    @property
    def is_held(self) -> bool:
        """Whether tensors of others share this memory."""
        return references(self.flat) > self._own_references

    def has_moved(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the user has made a view of this memory the gradient of another parameter, of any wrapper.

        Where its own parameter does not hold it, something in C++ does: only there is `.grad` kept.
        """
        pairs = zip(params, self.shown, strict=True)
        return any(param.grad is not shown and shown._use_count() > _ALONE[1] for param, shown in pairs)  # type: ignore[attr-defined]

    def show(self, place: int) -> torch.Tensor:
        """The gradient of this place for view mode; made anew if the user has moved the one there was."""
        view, shown = self.views[place], self.shown[place]
        if shown.data_ptr() != view.data_ptr() or shown.dtype != view.dtype:
            shown = self.shown[place] = view.detach()
        return shown
