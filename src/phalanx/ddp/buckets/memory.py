"""The memory of one bucket, and the question who else holds a piece of memory.

`.grad` after backward is promised to be memory that nothing overwrites behind the user's back. A copy keeps that
promise; so does the bucket's own memory, as long as the bucket takes other memory when a tensor of it is still held at
the next pass. Who holds what is read off reference counts, exactly and without a pass over memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ...plan import ParamSpec, Slot


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
    """Whether both name the same memory in the same layout (autograd may hand out a new tensor object)."""
    return (
        grad.layout == torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.stride() == view.stride()
        and grad.numel() > 0
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

    def show(self, place: int) -> torch.Tensor:
        """The gradient of this place for view mode; made anew if the user has moved the one there was."""
        view, shown = self.views[place], self.shown[place]
        if shown.data_ptr() != view.data_ptr() or shown.dtype != view.dtype:
            shown = self.shown[place] = view.detach()
        return shown
