"""The part of the optimizer's state that one rank holds, as text for each parameter and flat extents.

    live   views of what an optimizer holds now: to send, to save
    blank  new memory for a state that is described but not there yet: to receive into, to load into

Must not know how extents travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import StateError
from ...plan import ParamSpec
from ..partition.partition import OwnedTensor
from .tree import Leaf, Tree, describe, rebuild


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive elements of one leaf, from `start` on, counted in the whole parameter's leaf."""

    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


@dataclass
class LocalState:
    """`trees` by parameter; `extents` by parameter and path, in order; `states` by position in `owned`."""

    # `states` stays empty for `live`: there the optimizer itself has them.
    owned: Sequence[OwnedTensor]
    trees: dict[int, Tree] = field(default_factory=dict)
    extents: dict[tuple[int, str], list[Extent]] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def live(
        cls, owned: Sequence[OwnedTensor], state: Mapping[torch.Tensor, Any], names: Sequence[str]
    ) -> LocalState:
        """What `state` holds for the tensors of `owned`."""
        local = cls(owned)
        strange = [key for key in state if not isinstance(key, torch.Tensor)]
        if strange:
            # Torch's optimizers save it as it is. Here every rank has one of its own, and nobody can say which is right.
            raise StateError(
                f"the optimizer keeps {strange[0]!r} in its state, which belongs to no parameter, so that it can be neither "
                "divided nor collected. Keep it in the state of each parameter, or in `param_groups`."
            )
        for one in owned:
            # Parameters that have never had a gradient have none.
            if one.key not in state:
                continue
            tree, leaves = describe(state[one.key], one.key, names[one.index])
            # Slices of one parameter are stepped together, so the texts of their states are equal, step counters included.
            local.trees.setdefault(one.index, tree)
            for path, values in leaves.items():
                # Of the slice's shape: to be cut with the parameter. Anything else belongs to the parameter as a whole.
                elementwise = values.shape == one.key.shape
                local._add(one, path, _dense(values, one) if elementwise else values.contiguous(), elementwise)
        return local

    @classmethod
    def blank(cls, owned: Sequence[OwnedTensor], trees: Mapping[int, Tree], device: torch.device | None) -> LocalState:
        """Zeroed memory for the state that `trees` describe; on `device`, or where each tensor is."""
        local = cls(owned, dict(trees))
        for position, one in enumerate(owned):
            if one.index in trees:
                local._make(position, one, one.key.device if device is None else device)
        return local

    def _make(self, position: int, one: OwnedTensor, device: torch.device) -> None:
        def leaf(leaf: Leaf) -> torch.Tensor:
            elementwise = leaf.shape is None
            if leaf.shape is None:
                values = torch.empty_strided(one.shape, one.stride, dtype=leaf.dtype, device=device).zero_()
            else:
                values = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            self._add(one, leaf.path, values, elementwise)
            return values

        self.states[position] = rebuild(self.trees[one.index], device, leaf)

    def _add(self, one: OwnedTensor, path: str, values: torch.Tensor, elementwise: bool) -> None:
        # Dense, whatever its strides are: `_dense` and `_make` have seen to that.
        flat = values.as_strided((values.numel(),), (1,))
        start = 0
        if elementwise:
            # Without the elements of an edge that another rank owns: here they are not up to date.
            flat = flat[one.start - one.begin : one.stop - one.begin]
            start = one.start
        self.extents.setdefault((one.index, path), []).append(Extent(start, flat))

    def read(self, index: int, path: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy elements [start, stop) of a leaf, all of them held here, into `out`."""
        # A range may lie in several slices: they are cut to the size of the cache, not by what is sent.
        for extent in self.extents[index, path]:
            low, high = max(start, extent.start), min(stop, extent.stop)
            if low < high:
                out[low - start : high - start].copy_(extent.values[low - extent.start : high - extent.start])

    def write(self, index: int, path: str, start: int, stop: int, values: torch.Tensor) -> None:
        """Copy `values`, elements [start, stop) of a leaf, to wherever this rank holds them."""
        # Whoever writes need not know who holds what: the rest belongs to other ranks.
        for extent in self.extents.get((index, path), ()):
            low, high = max(start, extent.start), min(stop, extent.stop)
            if low < high:
                extent.values[low - extent.start : high - extent.start].copy_(values[low - start : high - start])

    def install(self, state: dict[torch.Tensor, Any]) -> None:
        """Make what is in this memory the state of an optimizer."""
        state.clear()
        for position, value in self.states.items():
            state[self.owned[position].key] = value


def _dense(values: torch.Tensor, one: OwnedTensor) -> torch.Tensor:
    if values.stride() == one.stride or values.numel() <= 1:
        return values
    # A copy, where an optimizer made state with other strides. To be read only: nobody writes it back.
    dense = torch.empty_strided(one.shape, one.stride, dtype=values.dtype, device=values.device)
    return dense.copy_(values)


def whole(specs: Sequence[ParamSpec]) -> list[OwnedTensor]:
    """Every parameter whole, owned by nobody in particular: what a consolidated state is made of."""
    return [
        OwnedTensor(index, 0, spec.numel, 0, spec.numel, spec.shape, spec.stride, torch.empty(0))
        for index, spec in enumerate(specs)
    ]
