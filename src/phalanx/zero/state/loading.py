"""A whole state, as `state_dict()` gives it, checked and cut for this rank. Nothing is changed by a refusal.

Must not know of process groups: every rank cuts its own part out of the same whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import StateError
from ...plan import ParamSpec
from ..partition.kinds import StateKeys, state_keys
from ..partition.param_table import ParamTable
from ..partition.storage import flatten
from .local_state import Extent, LocalState
from .sharded_optimizer import ShardedOptimizer
from .tree import describe


def check_structure(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless `state_dict` has the form of an optimizer's state with groups of these sizes."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise StateError(
            f"not an optimizer's state: expected the keys 'state' and 'param_groups', got {got}. "
            "Give what state_dict() of an optimizer returned."
        )
    saved = state_dict["param_groups"]
    if not isinstance(saved, Sequence) or not all(isinstance(group, Mapping) for group in saved):
        raise StateError(f"'param_groups' of an optimizer's state is a list of dicts, got {saved!r:.80}.")
    if len(saved) != len(groups):
        raise StateError(
            f"the state has {len(saved)} parameter groups, the optimizer {len(groups)}. Make the optimizer with the "
            "groups that were saved."
        )
    for number, (mine, theirs) in enumerate(zip(groups, saved, strict=True)):
        if "params" not in theirs or len(theirs["params"]) != len(mine["params"]):
            held = len(theirs.get("params", ()))
            raise StateError(
                f"group {number} has {held} parameters in the state and {len(mine['params'])} in the optimizer. "
                "Make the optimizer with the parameters that were saved."
            )


def check_states(
    states: Mapping[Any, Any], table: ParamTable, optimizer_class: type[torch.optim.Optimizer], elementwise: bool
) -> None:
    """Raise unless every state belongs to a parameter, is complete and fits it."""
    keys = state_keys(optimizer_class)
    seen: dict[int, tuple[str, set[str]]] = {}
    for param, state in states.items():
        # Torch has replaced numbers by parameters, as far as it has parameters for them.
        if not isinstance(param, torch.Tensor) or param not in table.index_of:
            raise StateError(
                f"the state has an entry for parameter {param!r}, but the optimizer has only "
                f"{len(table.params)} parameters. It was saved from another model."
            )
        index = table.index_of[param]
        name = table.names[index]
        if not isinstance(state, Mapping):
            raise StateError(f"{name}: its state must be a dict, got {type(state).__name__}.")
        if keys is not None:
            check_keys(set(state), keys, name, optimizer_class.__name__)
        # Of a class not known here nothing is known about its state, unless it declared that it acts element by element.
        if elementwise or keys is not None:
            _check_shapes(state, table.specs[index], name)
        if keys is not None:
            # What is optional depends on options, which are those of the group: its parameters have the same keys.
            group, mine = table.group_of[index], set(state)
            first, expected = seen.setdefault(group, (name, mine)) if mine else (name, mine)
            if mine != expected:
                raise StateError(
                    f"{name}: its state has {_listed(mine)}, that of {first} in the same group {_listed(expected)}. "
                    "The state is truncated or mixed up."
                )


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def check_keys(got: set[str], keys: StateKeys, name: str, class_name: str) -> None:
    """Raise unless these are the keys of a state of the class, or there is no state."""
    # No state at all is right for a parameter that has never had a gradient.
    missing = keys.required - got if got else set()
    foreign = got - keys.required - keys.optional
    if missing or foreign:
        expected = _listed(set(keys.required | keys.optional))
        raise StateError(
            f"{name}: not a state of {class_name}, which has {expected}; got {_listed(got)}. "
            "It is truncated, or another optimizer's."
        )


def _check_shapes(state: Mapping[str, Any], spec: ParamSpec, name: str) -> None:
    for key, value in state.items():
        # Cut with the parameter, a tensor of another shape would be cut in the wrong places, without notice.
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != spec.shape:
            raise StateError(
                f"{name}: its state '{key}' has shape {tuple(value.shape)}, the parameter {spec.shape}. "
                "The state was saved from another model, or is truncated."
            )


def normalised(
    optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, Any], groups: list[dict[str, Any]]
) -> dict[torch.Tensor, Any]:
    """The states, and the groups themselves, as the optimizer's own `__setstate__` brings old ones up to date."""
    # Without its constructor, which would make new state. It shares the options of the optimizer that is really run.
    alone = type(optimizer).__new__(type(optimizer))
    alone.__dict__.update(optimizer.__dict__)
    alone.__setstate__({"state": defaultdict(dict, states), "param_groups": groups})
    return {param: state for param, state in alone.state.items() if state}


def install(sharded: ShardedOptimizer, states: Mapping[torch.Tensor, Any]) -> None:
    """Make `states`, by parameter and whole, the optimizer's state: this rank keeps its own part."""
    table = sharded.table
    # All of it is described before anything is replaced: `describe` refuses what cannot be part of a state.
    found: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}
    for param, state in states.items():
        index = table.index_of[param]
        found[index] = describe(state, param, table.names[index])
    local = sharded.blank({index: tree for index, (tree, _) in sorted(found.items())})
    for (index, path), _ in local.extents.items():
        values = found[index][1][path]
        spec = table.specs[index]
        # Of a state that torch.distributed.checkpoint has filled (`shards.py`): only this rank's part is there.
        extents: Sequence[Extent] | None = getattr(values, "extents", None)
        if extents is not None:
            _write_extents(local, index, path, extents, table.names[index])
            continue
        # In the order of the parameter's memory, in which everything is cut. What this rank does not own is left out below.
        flat = flatten(values, spec) if tuple(values.shape) == spec.shape else values.reshape(-1)
        local.write(index, path, 0, flat.numel(), flat)
    sharded.set_state(local)


def _write_extents(local: LocalState, index: int, path: str, given: Sequence[Extent], name: str) -> None:
    """Copy extents into this rank's part of a state; all that this rank owns must be there."""
    wanted = held = 0
    for mine in local.extents[index, path]:
        wanted += mine.values.numel()
        held += sum(max(0, min(mine.stop, each.stop) - max(mine.start, each.start)) for each in given)
    if held < wanted:
        raise StateError(
            f"{name}: '{path}' has {held} of the {wanted} elements that this rank owns. Load the checkpoint into what "
            "get_state_dict() returns for this very optimizer."
        )
    for extent in given:
        local.write(index, path, extent.start, extent.stop, extent.values)
