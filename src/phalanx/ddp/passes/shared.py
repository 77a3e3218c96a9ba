"""Parameters that several wrappers have: two models with one encoder, or a wrapper inside a module that is wrapped.

Packing takes a gradient, so that one wrapper alone has it in a backward, and gives out the mean:

    the backward reached outputs of      who reduces a shared parameter
    one of the wrappers                  that one; to the others it is a backward of somebody else, whatever they wait for
    several, of which one reduces        that one; the others' forwards ran inside no_sync()
    several that reduce                  the first to pack it; the others find none and leave `.grad` alone

Wrappers pack in the order of their launches (`order.py`), which is the same on all ranks; so that it is, a shared parameter
is not packed on arrival. Should two of them have got gradient of one parameter all the same (the second a late part of a
nested backward), all ranks learn it from the tails, and raise: one mean would take the place of the other.
Must not know of memory or of launching.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import ReductionError
from .order import reducers_alive

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer
    from .backward import Pass


class Sharers:
    """The reducers, of any group, that have parameters of this one too. Nearly always there are none."""

    def __init__(self, reducer: Reducer) -> None:
        """Made once per reducer, when it knows its parameters; those that it finds are told."""
        # Weakly: a model that is wrapped anew has its old wrapper for a moment longer.
        self._known: weakref.WeakKeyDictionary[Reducer, set[int]] = weakref.WeakKeyDictionary()
        self._backward, self._reduced = -1, frozenset[int]()  # which of them the last pass had a mean of
        mine = set(map(id, reducer.params))
        for other in reducers_alive():
            common = mine.intersection(map(id, other.params)) if other is not reducer else None
            if common:
                self._known[other] = other.sharers._known[reducer] = common
        self._num_known = len(self._known)

    @property
    def params(self) -> set[int]:
        """Those in common with wrappers that are still there, by identity."""
        return set().union(*self._known.values())

    def have_changed(self) -> bool:
        """Whether a wrapper has come or gone since this was asked last."""
        before, self._num_known = self._num_known, len(self._known)
        return before != self._num_known

    @property
    def have_noted(self) -> bool:
        """Whether the backward that runs now has reached an output of one of them."""
        return any(other.noted is not None for other in self._known)

    def leave_out(self, indices: Sequence[int], params: Sequence[torch.Tensor]) -> list[int]:
        """Without those that another wrapper has too, which may have reduced them in this pass."""
        shared = self.params if indices else ()
        return [index for index in indices if id(params[index]) not in shared]

    def claim(self, reducer: Reducer, run: Pass) -> None:
        """The pass knows which means it has: raise if another wrapper has one of the same in this backward."""
        if not self._known:
            return
        mine: dict[int, str] = {}
        shared = self.params
        for bucket in run.buckets:
            wanted = run.wanted.get(bucket.index)
            for place, param in enumerate(bucket.params):
                if id(param) in shared and (wanted is None or wanted[place]):
                    mine[id(param)] = bucket.specs[place].name
        for other in self._known:
            theirs = other.sharers
            both = theirs._reduced.intersection(mine) if theirs._backward == reducer.backward else ()
            for common in both:
                raise ReductionError(
                    f"{reducer.collectives.me}: step {reducer.step}: parameter '{mine[common]}' belongs to two "
                    "DistributedDataParallel wrappers, and each of them got a part of its gradient in one backward. Wrap "
                    "the modules that share it in one wrapper, or use checkpoint(..., use_reentrant=False)."
                )
        self._backward, self._reduced = reducer.backward, frozenset(mine)
