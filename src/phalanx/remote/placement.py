"""Which parameter lives where: the caller's arguments sorted by owner.

Accepts what torch's optimizers accept, with RRefs in place of tensors. Asks an RRef for its owner
and nothing else; what it refers to is checked by the owner itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc

from phalanx.errors import ArgumentTypeError, ConfigError
from phalanx.remote.groups import Options, options_of
from phalanx.remote.owned import GroupSpec


class Group(NamedTuple):
    """One parameter group as the caller gave it. `options` is None for a bare list of RRefs."""

    options: Options | None
    params: list[Any]


class Share(NamedTuple):
    """What one worker gets: the numbers of its groups in the whole, and their specs."""

    info: Any
    groups: list[int]
    specs: list[GroupSpec]


def parse(params_rref: Any) -> list[Group]:
    """The caller's `params_rref`, an iterable of RRefs or of group dicts, as groups."""
    if isinstance(params_rref, (str, Mapping)) or not isinstance(params_rref, Iterable):
        raise ArgumentTypeError(
            f"params_rref is a {type(params_rref).__name__}; expected a list of RRefs or of parameter groups."
        )
    given = list(params_rref)
    if not given:
        raise ConfigError("params_rref is empty: there is nothing to optimize.")
    if not any(isinstance(item, Mapping) for item in given):
        return [Group(None, _rrefs(given, "params_rref"))]
    return [parse_group(item, f"params_rref[{index}]") for index, item in enumerate(given)]


def parse_group(group: Any, name: str = "param_group") -> Group:
    """One group dict, its "params" an RRef or a list of them."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise ArgumentTypeError(f"{name} is a {type(group).__name__}; expected a dict with 'params', a list of RRefs.")
    params = group["params"]
    if isinstance(params, rpc.PyRRef):
        params = [params]
    if isinstance(params, (str, Mapping, set)) or not isinstance(params, Iterable):
        raise ArgumentTypeError(f"{name}['params'] is a {type(params).__name__}; expected a list of RRefs.")
    rrefs = _rrefs(list(params), f"{name}['params']")
    if not rrefs:
        raise ConfigError(f"{name} has no parameters.")
    return Group(options_of(group), rrefs)


def place(groups: Sequence[Group], first_group: int = 0, first_position: int = 0) -> list[Share]:
    """`groups`, which follow those before `first_group`, cut into one share an owner."""
    shares: dict[int, Share] = {}
    position = first_position
    for number, group in enumerate(groups, first_group):
        for rref in group.params:
            info = rref.owner()
            share = shares.setdefault(info.id, Share(info, [], []))
            if number not in share.groups:
                share.groups.append(number)
                share.specs.append(GroupSpec(group.options, [], []))
            share.specs[-1].params.append(rref)
            share.specs[-1].positions.append(position)
            position += 1
    return list(shares.values())


def _rrefs(given: list[Any], name: str) -> list[Any]:
    for index, item in enumerate(given):
        if not isinstance(item, rpc.PyRRef):
            raise ArgumentTypeError(
                f"{name}[{index}] is a {type(item).__name__}; expected an RRef of a parameter. "
                "Wrap a parameter of this worker as RRef(param)."
            )
    return given
