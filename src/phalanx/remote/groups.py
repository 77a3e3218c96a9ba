"""Options of parameter groups (lr, betas, …) that two processes hold in common.

The caller's `param_groups` are plain dicts, so that schedulers and users write to them as to any
optimizer's; the owners' are the real ones. A `Ledger` remembers what the other side is known to
hold, and the difference travels with the next message: no round trip of its own, and a tensor
option changed in place is seen too.

Pure: no RPC, no threads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Options = dict[str, Any]
# Group index to (options set, options removed).
Changes = dict[int, tuple[Options, tuple[str, ...]]]

_IMMUTABLE = (bool, int, float, str, type(None))


class PerOwner(dict[str, Any]):
    """An option on which the owners differ, by owner name.

    Some optimizers keep a running estimate in their groups, and each owner sees only its own
    parameters. Assigning a plain value makes the owners agree again.
    """


class Ledger:
    """The options that the other side is known to hold, group by group."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.known = [_snapshot(group) for group in groups]

    def changes(self, groups: Sequence[Mapping[str, Any]]) -> Changes:
        """What must be told so that the other side holds what `groups` hold now."""
        found: Changes = {}
        for index, (known, group) in enumerate(zip(self.known, groups, strict=True)):
            put = {
                key: value
                for key, value in group.items()
                if key != "params" and not (key in known and (known[key] is value or same(known[key], value)))
            }
            removed = tuple(key for key in known if key not in group)
            if put or removed:
                found[index] = (put, removed)
        return found

    def note(self, changes: Changes) -> None:
        """The other side is now known to hold `changes`."""
        for index, (put, removed) in changes.items():
            self.known[index].update(_snapshot(put))
            for key in removed:
                self.known[index].pop(key, None)

    def append(self, group: Mapping[str, Any]) -> None:
        """A group was added at the end on both sides."""
        self.known.append(_snapshot(group))


def apply(groups: Sequence[dict[str, Any]], changes: Changes) -> None:
    """Write `changes` into `groups`."""
    for index, (put, removed) in changes.items():
        groups[index].update(put)
        for key in removed:
            groups[index].pop(key, None)


def options_of(group: Mapping[str, Any]) -> Options:
    """The options of a group, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def agree(values: Mapping[str, Any]) -> Any:
    """The one value all owners hold, or a `PerOwner` of theirs."""
    first, *others = values.values()
    return first if all(same(first, other) for other in others) else PerOwner(values)


def merge(held: Mapping[str, Mapping[str, Any]]) -> Options:
    """One group's options out of what each owner of it holds."""
    keys = dict.fromkeys(key for options in held.values() for key in options)
    return {key: agree({owner: options[key] for owner, options in held.items() if key in options}) for key in keys}


def same(left: Any, right: Any) -> bool:
    """Whether two option values are equal, tensors by dtype, shape and content."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _snapshot(group: Mapping[str, Any]) -> Options:
    return {
        key: value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }
