"""A bucket with memory behind it: dense gradients one after the other.

Does the moving of data that belongs to each transition of `slot.py`. Owns its memory and, between `take` and `give`, the
gradients it has taken.

`.grad` after backward is promised to be memory that nothing overwrites behind the user's back. A copy keeps that
promise; so does the bucket's own memory, as long as the bucket takes other memory when a tensor of it is still held at
the next pass. Who holds what is read off reference counts, exactly and without a pass over memory.
Must not know when to launch, nor of other buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import TypeVar, cast

import torch

from ...comm.memory.copies import copy_all
from ...plan import ParamSpec, Slot
from ...plan.params import gradient_dtype, lies_as
from . import slot
from .bucket import Bucket, Contents, Scale, Stage, multiplies
from .slot import ABSENT, COPIED, HELD, LATE, LOANED, LOCAL, SCATTERED, TAKEN, VIEWED

# From this size on a gradient is moved by an operation of its own, as soon as it arrives and while it is in the cache; small
# ones together when the bucket is full, because each operation costs more than moving them does.
LARGE_BYTES = 64 * 1024

# Whoever keeps one gradient of each step would keep a whole bucket with it: after so many times, copies are given out.
_MOST_KEPT = 3

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
Item = TypeVar("Item")


def _at(items: Sequence[Item], places: Sequence[int]) -> list[Item]:
    """The items at these places: nearly always all of them, where a line of Python per parameter would be felt."""
    return list(items) if len(places) == len(items) else [items[place] for place in places]


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

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether `grad` lies in this memory. Of tensors by themselves only: a marker of ZeRO's has no memory."""
        if type(grad) is not torch.Tensor or grad.layout != torch.strided:
            return False
        return 0 <= grad.data_ptr() - self.flat.data_ptr() < self.flat.nbytes

    def show(self, place: int) -> torch.Tensor:
        """The gradient of this place for view mode; made anew if the user has moved the one there was."""
        view, shown = self.views[place], self.shown[place]
        if shown.data_ptr() != view.data_ptr() or shown.dtype != view.dtype:
            shown = self.shown[place] = view.detach()
        return shown


# -- the bucket ------------------------------------------------------------------------------------


class DenseBucket(Bucket):
    """Gradients one after the other in one flat memory."""

    sparse = False

    def __init__(self, contents: Contents, allocate: Allocate, as_views: bool) -> None:
        super().__init__(contents)
        self.dtype = contents.planned.dtype
        self.as_views = as_views
        self._allocate = allocate
        self._memory: BucketMemory | None = None
        item = self.dtype.itemsize
        self.large = bytearray(slot.numel * item >= LARGE_BYTES for slot in self.slots)
        self._unowned = [p for p, large in zip(self.params, self.large, strict=True) if large or as_views]
        # By slot: the tensor that was `.grad` when it was taken, where somebody else may hold it; it gets the mean.
        self._owners: list[torch.Tensor | None] = [None] * len(self.slots)
        self._num_kept = 0  # how often somebody kept what had been given as a loan
        # View mode: what an unused gradient held, whose place in the body the transport overwrites.
        self._kept: dict[int, torch.Tensor] = {}

    # -- memory --------------------------------------------------------------------------------

    @property
    def memory(self) -> BucketMemory:
        """Taken when it is first needed: gradients of an earlier plan may hold theirs until then."""
        if self._memory is None:
            numel = sum(slot.numel for slot in self.slots)
            rides = self.tail.numel if self.tail_rides else 0
            flat = self._allocate(numel + rides, self.dtype, self.device)
            apart = None if rides else torch.zeros(self.tail.numel, dtype=self.tail_dtype, device=self.device)
            self._memory = BucketMemory(flat, self.slots, self.specs, apart, rides, self.as_views)
            self.grad_bucket = None
        return self._memory

    @property
    def flat(self) -> torch.Tensor:
        """Everything that travels: the body, and a tail that rides."""
        return self.memory.flat

    @property
    def body(self) -> torch.Tensor:
        """The gradients, one after the other."""
        return self.memory.body

    @property
    def views(self) -> list[torch.Tensor]:
        """The gradients in the body, each in its parameter's shape and strides."""
        return self.memory.views

    @property
    def tail_data(self) -> torch.Tensor:
        return self.memory.tail

    @property
    def tail_dtype(self) -> torch.dtype:
        return self.dtype if self.tail_rides else torch.float32

    def open(self) -> None:
        super().open()
        if self._memory is not None and self._memory.is_loaned:
            if self._memory.is_held:
                self._memory = None  # it stays with those who hold it, all of it
                self._num_kept += 1
            else:
                self._memory.is_loaned = False
        if self.as_views and self._memory is not None and self._memory.has_moved(self.params):
            self._memory = None  # it stays with the gradients that lie there

    @property
    def is_held(self) -> bool:
        """Whether tensors of others share its memory. In view mode that may be meant: see `leave_to`."""
        return self._memory is not None and self._memory.is_held

    def leave_to(self, params: Iterable[torch.nn.Parameter]) -> None:
        """View mode: leave the memory to gradients of other slots that lie there (`a.grad = b.grad.detach()`).

        Only to gradients of `params`. A user who holds views of it wants to find the next means there, as in torch.
        """
        memory = self._memory
        assert memory is not None, "asked only where somebody holds it"
        own = {id(param): view for param, view in zip(self.params, memory.views, strict=True)}
        for param in params:
            grad, view = param.grad, own.get(id(param))
            if grad is not None and memory.holds(grad) and (view is None or not is_same(grad, view)):
                self._memory = None
                return

    # -- in ------------------------------------------------------------------------------------

    def take_one(self, place: int, scale: Scale) -> None:
        """Take one large gradient ahead of the others; one that is not there or not dense waits for `take`."""
        grad = self.params[place].grad
        if grad is None or grad.layout != torch.strided:
            return
        self._move_in(place, grad, scale)
        self.params[place].grad = None
        if not self.as_views:
            self._owners[place] = grad
            del grad
            # Freed here where it is ours, the next gradient is made in memory that is still in the cache.
            self._free_unshared(place)
        slot.pack(self.states, place)

    def take(self, scale: Scale) -> list[int] | None:
        num_local = self.states.count(LOCAL)
        rest: Sequence[int] = range(len(self.slots))
        if num_local != len(rest):
            rest = [place for place in rest if self.states[place] != TAKEN]
        if num_local == len(rest) and self._take_together(rest, scale):
            return None
        used = [int(state in (HELD, LOCAL, LATE, TAKEN)) for state in self.states]
        for place in rest:
            used[place] &= self._take_any(place, scale)
        return None if all(used) else used

    def _take_together(self, rest: Sequence[int], scale: Scale) -> bool:
        """The usual case, by one operation over all gradients; false if one is missing or sparse after all."""
        params, views = _at(self.params, rest), _at(self.views, rest)
        # Autograd may call a gradient ready that is undefined, which is looked for only once something goes wrong.
        grads = cast("list[torch.Tensor]", [param.grad for param in params])
        targets, sources = views, grads
        try:
            if self.as_views:
                moved = [k for k, grad in enumerate(grads) if not is_same(grad, views[k])]
                targets, sources = _at(views, moved), _at(grads, moved)
            if targets:
                torch._foreach_copy_(targets, sources)
        except (AttributeError, TypeError, RuntimeError):
            if any(grad is None or grad.layout != torch.strided for grad in grads):
                return False
            raise
        if multiplies(scale) and len(rest) == len(self.params):
            self.body.mul_(scale)
        elif multiplies(scale) and rest:
            torch._foreach_mul_(views, scale)
        for param in params:
            param.grad = None
        slot.pack_local(self.states)
        if not self.as_views:
            self._own(rest, grads)
        return True

    def _own(self, places: Sequence[int], grads: list[torch.Tensor]) -> None:
        """Remember whom the mean is owed to. Empties `grads`, since it would count as a holder."""
        owners = self._owners
        if len(places) == len(owners):
            owners[:] = grads
        else:
            for place, grad in zip(places, grads, strict=True):
                owners[place] = grad
                del grad
        grads.clear()
        if any(self.large):
            for place in places:
                if self.large[place]:
                    self._free_unshared(place)

    def _take_any(self, place: int, scale: Scale) -> bool:
        """Take whatever the slot has: a late part, a gradient, or none. True if it counts as used."""
        param, view, state = self.params[place], self.views[place], self.states[place]
        grad = param.grad
        if grad is not None and grad.layout != torch.strided:
            grad = grad.to_dense()
        if state == LATE:
            if grad is not None:  # the body holds the first part already
                late = grad.to(view.dtype)
                view.add_(late * scale) if isinstance(scale, torch.Tensor) else view.add_(late, alpha=scale)
        elif grad is None:
            view.zero_()
        else:
            if state == ABSENT:
                self._keep_unused(place, grad)
            elif not self.as_views:
                self._owners[place] = grad
            self._move_in(place, grad, scale)
        param.grad = None
        used = state == LATE or grad is not None
        slot.pack(self.states, place)
        del grad
        if self.large[place] and state in (HELD, LOCAL):
            self._free_unshared(place)
        return used

    def take_nothing(self) -> None:
        self.body.zero_()
        for place, param in enumerate(self.params):
            if (grad := param.grad) is not None:
                self._keep_unused(place, grad)
                param.grad = None
            slot.pack(self.states, place)

    def _keep_unused(self, place: int, grad: torch.Tensor) -> None:
        """A gradient of earlier times stays to the bit if no other rank uses its parameter now."""
        self._earlier.add(place)
        if self.as_views and is_same(grad, self.views[place]):
            self._kept[place] = grad.detach().clone()
        else:
            self._owners[place] = grad

    def _move_in(self, place: int, grad: torch.Tensor, scale: Scale) -> None:
        view = self.views[place]
        if is_same(grad, view):
            if multiplies(scale):
                view.mul_(scale)
        elif multiplies(scale) and grad.dtype == view.dtype:
            torch.mul(grad.detach(), scale, out=view)
        else:
            # In this order: a product is rounded to the dtype of its factors, whatever it is written to.
            view.copy_(grad)
            if multiplies(scale):
                view.mul_(scale)

    def record_stream(self, stream: torch.Stream) -> None:
        """Name everything that `give` uses to the allocator: it is given out on another stream than it was made on."""
        for tensor in (self.flat, *self._owners):
            if tensor is not None:
                tensor.record_stream(stream)

    def _free_unshared(self, place: int) -> None:
        if is_unshared(self._owners, place):
            self._owners[place] = None

    # -- back ----------------------------------------------------------------------------------

    def clear(self) -> None:
        self.body.zero_()

    def scale_mean(self, factor: Scale) -> None:
        self.body.mul_(factor)

    def add(self, other: Bucket) -> None:
        assert isinstance(other, DenseBucket), "late parts of a dense bucket are dense"
        self.body.add_(other.body)

    def give(self, wanted: Sequence[int] | None) -> None:
        self.stage = Stage.GIVEN
        places: Sequence[int] = range(len(self.slots))
        if wanted is not None:
            for place in places:
                if not wanted[place]:
                    self._give_back(place)
            places = [place for place in places if wanted[place]]
        if self.as_views:
            for place in places:
                self._show(place)
        else:
            owners = self._owners
            self._copy_to_owners([place for place in places if owners[place] is not None] if self._lacks_owners else places)
            for place in [place for place in places if owners[place] is None] if self._lacks_owners else ():
                self._give_new(place)
        self._owners = [None] * len(self.slots)
        self._kept.clear()

    @property
    def _lacks_owners(self) -> bool:
        return any(map(is_, self._owners, repeat(None)))

    def _show(self, place: int) -> None:
        param = self.params[place]
        if gradient_dtype(param) != self.dtype or not lies_as(param, self.specs[place]):
            self._give_new(place)
            return
        param.grad = self.memory.show(place)
        slot.give(self.states, place, VIEWED)

    def _copy_to_owners(self, places: Sequence[int]) -> None:
        """One operation for all of them, then each is `.grad` again."""
        if not places:
            return
        owners, params = self._owners, self.params
        copy_all(cast("list[torch.Tensor]", _at(owners, places)), _at(self.views, places))
        misfits = set()
        for place in places:
            try:
                params[place].grad = owners[place]
            except RuntimeError:
                # The gradient was in low precision while the parameter was; the parameter is not any more.
                misfits.add(place)
                owners[place] = None
        if len(places) == len(self.slots) and not misfits:
            slot.give_copies(self.states)
        else:
            for place in places:
                if place not in misfits:
                    slot.give(self.states, place, COPIED)

    def mark_scattered(self) -> None:
        """The mean is kept elsewhere, each rank's slice on that rank. `.grad` stays None: more may come late."""
        self.stage = Stage.GIVEN
        slot.scatter(self.states)

    def give_markers(self, wanted: Sequence[int], markers: Sequence[torch.Tensor]) -> None:
        """At the end of a pass whose means are elsewhere: markers stand for them in `.grad`."""
        for place, marker in enumerate(markers):
            if wanted[place]:
                self.params[place].grad = marker
            else:
                self._give_back(place)
        self._owners = [None] * len(self.slots)
        self._kept.clear()

    def _give_new(self, place: int) -> None:
        """The gradient that was taken is gone (or there was none): the body's memory takes its place, or a new tensor."""
        param, view = self.params[place], self.views[place]
        dtype = gradient_dtype(param)
        may_loan = self.large[place] and dtype == view.dtype and self._num_kept < _MOST_KEPT
        if may_loan and lies_as(param, self.specs[place]):
            param.grad = view.detach()  # a tensor of its own, so that references to it count
            self.memory.is_loaned = True
            slot.give(self.states, place, LOANED)
        else:
            param.grad = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(view)
            slot.give(self.states, place, COPIED)

    def _give_back(self, place: int) -> None:
        """No rank used the parameter: its gradient is what it was."""
        if place in self._kept:
            self.views[place].copy_(self._kept[place])
            self.params[place].grad = self.memory.show(place)
        elif self._owners[place] is not None:
            # Where nothing was taken, nothing is put back: another wrapper of the parameter may have given it its mean.
            self.params[place].grad = self._owners[place]
        if self.states[place] != SCATTERED:
            slot.give(self.states, place, VIEWED if place in self._kept else COPIED)

    def abandon(self) -> None:
        for place, owner in enumerate(self._owners):
            if owner is not None and self.states[place] in slot.GONE:
                # Taken in low precision, and the parameter may be in full precision again.
                self.params[place].grad = owner.to(gradient_dtype(self.params[place]))
        # View mode: their places in the body are no gradients any more.
        for place, kept in self._kept.items():
            self.params[place].grad = kept
        self._owners = [None] * len(self.slots)
        self._kept.clear()
        super().abandon()
