"""Optimizers out and in: plain ones, those that step in backward, and sharded ones, by the names of their parameters.

A state is a text for each parameter and leaves (`zero.state.tree`), whoever holds it: so what one kind of optimizer saved
any other loads, whole or divided. Must not know of models, schedulers or files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import StateError
from ..optim.in_backward import InBackward
from ..plan import ParamSpec, specs_of
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.partition.kinds import state_keys
from ..zero.partition.storage import flatten
from ..zero.state.loading import check_keys
from ..zero.state.local_state import LocalState
from ..zero.state.tree import Leaf, describe, leaves_of, rebuild
from .layout import Captured, Piece, dtype_name, info_of_spec, whole_piece
from .source import Source
from .storage.manifest import TensorInfo
from .tree import decode, encode

Names = Mapping[torch.Tensor, str]


class Chosen(Protocol):
    """What of a state is wanted, and under which names (`apply.Choice`)."""

    @property
    def strict(self) -> bool:
        """Whether whatever does not fit is an error."""

    def skips(self, name: str) -> bool:
        """Whether a parameter stays as it is."""

    def new_name(self, name: str) -> str:
        """The name here of what was saved under `name`."""


def members(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers that an optimizer consists of."""
    return optimizer.optimizers if isinstance(optimizer, InBackward) else [optimizer]


def named_params(optimizer_params: Sequence[torch.Tensor], names: Names) -> list[str]:
    """The names under which states are saved: the model's, or the number where the model does not know the parameter."""
    return [names.get(param, f"#{number}") for number, param in enumerate(optimizer_params)]


def options_of(groups: Sequence[Mapping[str, Any]], label: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The options of every group as JSON, with the names of its parameters."""
    at = 0
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        tree, leaves = encode(options, f"{label}: the options of a group")
        if leaves:
            raise StateError(f"{label}: an option of a group, '{next(iter(leaves))}', is a tensor with dimensions.")
        count = len(group["params"])
        yield {"options": tree, "params": list(names[at : at + count])}
        at += count


# -- out -------------------------------------------------------------------------------------------


def capture_optimizer(
    label: str, optimizer: Any, names: Names, found: Captured, tells: bool, own: Collection[str] = ()
) -> None:
    """Add an optimizer. With `tells` this rank speaks for all where they hold the same.

    `own` are parameters that each rank trains for itself: of their states the one of the rank that tells is added, for
    those who load on another number of ranks; `own_states` has each rank's.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        _capture_sharded(label, optimizer, names, found)
    else:
        _capture_plain(label, members(optimizer), names, found, tells, own)


def own_states(optimizer: Any, names: Names, own: Collection[str]) -> dict[str, Any]:
    """The states of the parameters that this rank trains for itself, by name; empty for one that has none yet."""
    # What ZeRO steps it makes alike, whoever reduced it or not.
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return {}
    found = {}
    for one in members(optimizer):
        for group in one.param_groups:
            for param in group["params"]:
                if names.get(param) in own:
                    found[names[param]] = dict(one.state.get(param, {}))
    return found


def _capture_plain(
    label: str,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
    found: Captured,
    tells: bool,
    own: Collection[str],
) -> None:
    groups = [group for one in optimizers for group in one.param_groups]
    params = [param for group in groups for param in group["params"]]
    called = named_params(params, names)
    states: dict[str, Any] = {}
    for optimizer in optimizers:
        _refuse_foreign(label, optimizer, params)
    for param, name in zip(params, called, strict=True):
        state = next((one.state[param] for one in optimizers if param in one.state), None)
        if not state or (name in own and not tells):
            continue
        kept = found.own if name in own else found.alike
        states[name], leaves = describe(state, param, f"{label}: '{name}'")
        for path, leaf in leaves.items():
            # In the order of the parameter's memory, in which ZeRO cuts it, whatever strides the optimizer chose.
            if leaf.shape == param.shape:
                (spec,) = specs_of([(name, param)])
                piece = Piece("", info_of_spec(spec, leaf.dtype), 0, flatten(leaf.detach(), spec))
            else:
                piece = whole_piece(path, leaf)
            kept.append(Piece(f"{label}/{name}/{path}", piece.info, 0, piece.values))
    # The same on every rank, so that one of them says it.
    if tells:
        told = {"class": type(optimizers[0]).__name__, "groups": list(options_of(groups, label, called)), "states": states}
        found.texts[label] = told


def _refuse_foreign(label: str, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    known = set(params)
    foreign = [key for key in optimizer.state if key not in known]
    if foreign:
        kind = type(optimizer).__name__
        raise StateError(f"{label}: {kind} keeps a state under {foreign[0]!r:.60}, which is no parameter of it.")


def _capture_sharded(
    label: str, optimizer: ZeroRedundancyOptimizer, names: Names, found: Captured
) -> None:
    sharded = optimizer.sharded
    table = sharded.table
    called = named_params(table.params, names)
    live = LocalState.live(sharded.partition.owned, sharded.optim.state, table.names)
    for index, tree in live.trees.items():
        for leaf in leaves_of(tree):
            key, info = f"{label}/{called[index]}/{leaf.path}", _leaf_info(leaf, table.specs[index])
            extents = live.extents.get((index, leaf.path), [])
            # What cannot be cut is held whole with each slice; once is enough.
            for extent in extents if leaf.shape is None else extents[:1]:
                if extent.values.numel() or not info.numel:
                    found.own.append(Piece(key, info, extent.start, extent.values))
    # Each rank knows the states of its own part; whoever loads puts them together.
    found.texts[label] = {
        "class": sharded.optim.__class__.__name__,
        "groups": list(options_of(optimizer.param_groups, label, called)),
        "states": {called[index]: tree for index, tree in live.trees.items()},
    }


def _leaf_info(leaf: Leaf, spec: ParamSpec) -> TensorInfo:
    if leaf.shape is None:
        return info_of_spec(spec, leaf.dtype)
    stride = torch.empty(leaf.shape, device="meta").stride()
    return TensorInfo(dtype_name(leaf.dtype), leaf.dtype.itemsize, leaf.shape, tuple(stride))


# -- in --------------------------------------------------------------------------------------------


_NOTHING = torch.empty(0)


class OptimizerLoad:
    """One optimizer's state, checked and then set: of any class, whole or divided.

    `own` are the states that this rank had saved for itself; they stand for those that all ranks have in common.
    """

    def __init__(
        self, label: str, optimizer: Any, names: Names, source: Source, choice: Chosen, own: Mapping[str, Any]
    ) -> None:
        self._label, self._optimizer, self._source = label, optimizer, source
        self.left_out: list[str] = []
        with source.reading(label):
            self._match(source.optimizer(label), optimizer, names, choice, own)

    def _match(self, told: Mapping[str, Any], optimizer: Any, names: Names, choice: Chosen, own: Mapping[str, Any]) -> None:
        is_zero = isinstance(optimizer, ZeroRedundancyOptimizer)
        self._members = [optimizer] if is_zero else members(optimizer)
        self._groups = [group for one in self._members for group in one.param_groups]
        self._params = [param for group in self._groups for param in group["params"]]
        called = named_params(self._params, names)
        saved = {choice.new_name(name): name for group in told["groups"] for name in group["params"]}
        # By name, or by number where the file knows no names.
        self._saved_names = [saved.get(name, saved.get(f"#{n}")) for n, name in enumerate(called)]
        self._options = self._match_groups(told, called, choice)
        self._trees: dict[int, Any] = {}
        self._own: dict[int, Any] = {}
        # States of parameters that were not chosen stay as they are.
        self._kept = {n for n, name in enumerate(self._saved_names) if name is None or choice.skips(called[n])}
        for index, name in enumerate(self._saved_names):
            if name is not None and name in own and index not in self._kept and not is_zero:
                self._own[index] = own[name]
                self._check_keys(own[name], called[index])
                continue
            tree = told["states"].get(name)
            if tree is None:
                continue
            if index in self._kept:
                self.left_out.append(f"{self._label} '{called[index]}': skipped")
                continue
            self._check_keys(tree.get("dict", ()), called[index])
            self._check_shapes(index, tree, called[index])
            rebuild(tree, torch.device("cpu"), lambda leaf: _NOTHING)  # which raises here, not when the model is loaded
            self._trees[index] = tree

    def _class(self) -> type[torch.optim.Optimizer]:
        first = self._members[0]
        return first.optimizer_class if isinstance(first, ZeroRedundancyOptimizer) else type(first)

    def _match_groups(self, told: Mapping[str, Any], called: Sequence[str], choice: Chosen) -> list[dict[str, Any]]:
        """The saved options for every group here: those of the group that had its first parameter that was saved."""
        source_groups = {name: group for group in told["groups"] for name in group["params"]}
        found, at = [], 0
        for number, group in enumerate(self._groups):
            names = self._saved_names[at : at + len(group["params"])]
            shown = called[at : at + len(group["params"])]
            at += len(group["params"])
            for name, new in zip(names, shown, strict=True):
                if name is None and not choice.skips(new) and choice.strict:
                    raise StateError(
                        f"{self._source.where} does not fit the {self._label}: '{new}' in group {number} is in none of its "
                        f"{len(told['groups'])} groups. Give rename=, skip= or strict=False."
                    )
                if name is None:
                    self.left_out.append(f"{self._label} '{new}': not in the checkpoint")
            loaded = [name for name, new in zip(names, shown, strict=True) if name is not None and not choice.skips(new)]
            self._check_options([source_groups[name]["options"] for name in loaded], number, choice.strict)
            first = next((name for name in names if name is not None), None)
            tree = source_groups[first]["options"] if first is not None else {}
            options = decode(tree, _no_leaf)
            if not isinstance(options, dict):
                raise TypeError(f"the options of group {number} are {options!r:.60}")
            found.append(options)
        return found

    def _check_options(self, trees: Sequence[Mapping[str, Any]], number: int, strict: bool) -> None:
        """A group of parameters from several saved ones takes the options of one. Refuse if the others had others."""
        differing = {key for tree in trees for key in {*tree, *trees[0]} if tree.get(key) != trees[0].get(key)}
        if not differing:
            return
        text = f"group {number} has parameters of saved groups that differ in {', '.join(sorted(differing))}"
        if strict:
            raise StateError(
                f"{self._source.where} does not fit the {self._label}: {text}. Make the groups as they were, or give "
                "strict=False for the options of the first parameter's."
            )
        self.left_out.append(f"{self._label}: {text}; it has those of its first parameter's")

    def _check_keys(self, found: Collection[str], name: str) -> None:
        keys = state_keys(self._class())
        if keys is not None:
            check_keys(set(found), keys, f"'{name}'", self._class().__name__)

    def _check_shapes(self, index: int, tree: Any, name: str) -> None:
        for leaf in leaves_of(tree):
            info = self._source.infos.get(self._key(index, leaf))
            shape = tuple(self._params[index].shape)
            if info is None or (leaf.shape is None and info.shape != shape):
                got = "nothing" if info is None else f"shape {info.shape}"
                raise StateError(
                    f"{self._source.where}: {self._label}: '{name}' has shape {shape}, its saved state '{leaf.path}' {got}. "
                    "It is another model's."
                )

    def _key(self, index: int, leaf: Leaf) -> str:
        return f"{self._label}/{self._saved_names[index]}/{leaf.path}"

    # -- changes -------------------------------------------------------------------------------

    def run(self) -> None:
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            self._set_sharded(self._optimizer)
        else:
            self._set_plain()

    def _set_sharded(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Every rank reads its own part, from whichever files have it."""
        sharded = optimizer.sharded
        local = sharded.blank(dict(sorted(self._trees.items())))
        for index, tree in self._trees.items():
            for leaf in leaves_of(tree):
                key = self._key(index, leaf)
                info = self._source.infos[key]
                like = info_of_spec(sharded.table.specs[index], leaf.dtype) if leaf.shape is None else info
                for extent in local.extents.get((index, leaf.path), ()):
                    if extent.values.numel():
                        extent.values.copy_(self._source.ordered(key, like, extent.start, extent.stop))
        live = sharded.optim.state
        kept = {one.key: live[one.key] for one in sharded.partition.owned if one.index in self._kept and one.key in live}
        sharded.set_state(local)
        sharded.optim.state.update(kept)
        optimizer.set_options(self._options)

    def _set_plain(self) -> None:
        at = 0
        for one in self._members:
            count = sum(len(group["params"]) for group in one.param_groups)
            chosen = [index for index in range(at, at + count) if index in self._trees or self._own.get(index)]
            states = {index - at: self._rebuilt(index) for index in chosen}
            unchosen = [self._params[index] for index in range(at, at + count) if index in self._kept]
            unchanged = {param: one.state[param] for param in unchosen if param in one.state}
            groups, number = [], 0
            for group in one.param_groups:
                # Lists of options are by group of the whole optimizer; identity finds the place.
                options = self._options[next(k for k, mine in enumerate(self._groups) if mine is group)]
                numbers = list(range(number, number + len(group["params"])))
                number += len(numbers)
                kept = {key: value for key, value in group.items() if key != "params"}
                groups.append({**kept, **options, "params": numbers})
            one.load_state_dict({"state": states, "param_groups": groups})
            self._restore_dtypes(one, states)
            one.state.update(unchanged)
            at += count

    def _restore_dtypes(self, optimizer: torch.optim.Optimizer, states: Mapping[int, Any]) -> None:
        """Torch casts states to their parameter's dtype. What was kept in another is what continuing to the bit needs."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, state in states.items():
            mine = optimizer.state[params[index]]
            for key, value in state.items():
                loaded = mine.get(key)
                if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    mine[key] = value.to(loaded.device)

    def _rebuilt(self, index: int) -> Any:
        if index in self._own:
            return self._own[index]
        param = self._params[index]

        def leaf(leaf: Leaf) -> torch.Tensor:
            key = self._key(index, leaf)
            saved = self._source.whole(key)
            if leaf.shape is None:
                return torch.empty_like(param, dtype=leaf.dtype).copy_(saved)
            return saved.clone().to(param.device)

        return rebuild(self._trees[index], param.device, leaf)


def _no_leaf(path: str) -> torch.Tensor:
    raise StateError(f"an option of a group has a tensor at '{path}', which is never saved there.")
