"""An optimizer's state dict, whole on the caller and in parts on the owners.

The whole has the plain optimizer's format: parameters numbered through the groups in order. Each
owner's optimizer numbers its own parameters from zero; `Part` says which is which.

    groups   [ps0.a, ps1.a, ps0.b]  [ps1.b]        whole      0 1 2 | 3
    ps0      [a, b]                                part       0 1        = whole 0, 2
    ps1      [a]  [b]                              part       0 | 1      = whole 1, 3

Pure: no RPC. Raises StateError before anything is sent when the whole does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import StateError
from phalanx.remote.groups import PerOwner, agree, merge, options_of

StateDict = dict[str, Any]


@dataclass
class Part:
    """One owner's share: `groups[i]` is the whole's number of its group i, and
    `positions[i]` the whole's numbers of that group's parameters."""

    owner: str
    groups: list[int] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many parameters this owner has."""
        return sum(map(len, self.positions))

    def flat(self) -> list[int]:
        """The whole's number of each of this owner's parameters, in its own numbering."""
        return [position for group in self.positions for position in group]


def join(parts: Sequence[Part], saved: Sequence[StateDict], sizes: Sequence[int]) -> StateDict:
    """The whole out of every owner's state dict; `sizes` are the groups' numbers of parameters."""
    state: dict[Any, Any] = {}
    loose: dict[Any, dict[str, Any]] = {}
    for part, own in zip(parts, saved, strict=True):
        numbers = part.flat()
        for key, value in own["state"].items():
            if isinstance(key, int):
                state[numbers[key]] = value
            else:
                loose.setdefault(key, {})[part.owner] = value
    whole = {number: state[number] for number in sorted(state)}
    whole.update({key: agree(values) for key, values in loose.items()})
    groups: list[StateDict] = []
    start = 0
    for index, size in enumerate(sizes):
        held = {
            part.owner: options_of(own["param_groups"][part.groups.index(index)])
            for part, own in zip(parts, saved, strict=True)
            if index in part.groups
        }
        groups.append({**merge(held), "params": list(range(start, start + size))})
        start += size
    return {"state": whole, "param_groups": groups}


def split(whole: Mapping[str, Any], parts: Sequence[Part], sizes: Sequence[int]) -> list[StateDict]:
    """Every owner's state dict out of the whole, or StateError when the whole does not fit."""
    groups = _checked_groups(whole, sizes)
    # A saved dict may number its parameters as it likes; what counts is their order in the groups.
    numbers = [number for group in groups for number in group["params"]]
    state = whole["state"]
    known = set(numbers)
    stray = [key for key in state if isinstance(key, int) and key not in known]
    if stray:
        raise StateError(f"the state dict holds state of parameters {stray[:5]} that are in none of its groups.")
    common = {key: value for key, value in state.items() if key not in known}
    cut: list[StateDict] = []
    for part in parts:
        own = {i: state[numbers[at]] for i, at in enumerate(part.flat()) if numbers[at] in state}
        start = 0
        own_groups: list[StateDict] = []
        for index, positions in zip(part.groups, part.positions, strict=True):
            options = {k: _own(v, part.owner, k) for k, v in options_of(groups[index]).items()}
            own_groups.append({**options, "params": list(range(start, start + len(positions)))})
            start += len(positions)
        own_common = {key: _own(value, part.owner, str(key)) for key, value in common.items()}
        cut.append({"state": {**own, **own_common}, "param_groups": own_groups})
    return cut


def _checked_groups(whole: Mapping[str, Any], sizes: Sequence[int]) -> Sequence[Mapping[str, Any]]:
    if not isinstance(whole, Mapping) or not {"state", "param_groups"} <= set(whole):
        raise StateError("a state dict needs the keys 'state' and 'param_groups'; nothing was changed.")
    groups: Sequence[Mapping[str, Any]] = whole["param_groups"]
    if len(groups) != len(sizes):
        raise StateError(f"the state dict has {len(groups)} groups, the optimizer {len(sizes)}; nothing was changed.")
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        if len(group["params"]) != size:
            raise StateError(
                f"group {index} of the state dict has {len(group['params'])} parameters, "
                f"the optimizer's {size}; nothing was changed."
            )
    return groups


def _own(value: Any, owner: str, key: str) -> Any:
    if not isinstance(value, PerOwner):
        return value
    if owner not in value:
        raise StateError(
            f"'{key}' was saved for each of {sorted(value)} and for {owner} not; nothing was changed. "
            f"Put one value for '{key}' into the state dict."
        )
    return value[owner]
