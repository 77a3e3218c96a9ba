"""The parameters of an optimizer in one fixed numbering: that of `state_dict()`, group after group.

Must not know which rank owns what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from ...errors import ArgumentTypeError, ConfigError, PhalanxError
from ...plan import ParamSpec, specs_of


def check_params(params: Any) -> list[Any]:
    """`params` as a list that can be read twice; refuses what no optimizer takes, before anything is built."""
    if isinstance(params, torch.Tensor):
        raise ArgumentTypeError(
            f"params argument given to the optimizer should be an iterable of Tensors or dicts, but got "
            f"{torch.typename(params)}. Put the tensor into a list."
        )
    # Once: model.parameters() is a generator, and torch's constructor reads what is returned here.
    try:
        listed = list(params)
    except TypeError as error:
        raise ArgumentTypeError(
            f"params must be an iterable of tensors, of named tensors or of parameter groups, got "
            f"{torch.typename(params)}. Give model.parameters()."
        ) from error
    if not listed:
        raise ConfigError("ZeroRedundancyOptimizer got an empty parameter list. Give model.parameters().")
    # One form for all: torch takes the first item to say what the others are.
    forms = {_form(item) for item in listed}
    if len(forms) != 1 or None in forms:
        strange = next((item for item in listed if _form(item) is None), None)
        got = f"an item of type {torch.typename(strange)}" if None in forms else "a mixture"
        raise ArgumentTypeError(
            f"params must be an iterable of tensors, of (name, tensor) pairs or of parameter groups, got {got}."
        )
    for item in listed:
        if isinstance(item, Mapping) and "params" not in item:
            raise ConfigError(
                f"a parameter group must have a 'params' key with its parameters, got the keys {sorted(item)}."
            )
    # Read once: a group may hold a generator.
    listed = [{**item, "params": _read(item["params"])} if isinstance(item, Mapping) else item for item in listed]
    if all(isinstance(item, Mapping) and not len(item["params"]) for item in listed):
        raise ConfigError("ZeroRedundancyOptimizer got no parameter: its groups are empty. Give model.parameters().")
    _refuse_duplicates(listed)
    return listed


def _read(params: Any) -> Any:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise ArgumentTypeError(
            f"the 'params' of a parameter group are a list of tensors, got {params!r:.80}. Give model.parameters()."
        )
    if isinstance(params, Set):
        raise ArgumentTypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of tensors in sets will "
            "change between runs, and ranks. Please use a list instead."
        )
    return params if isinstance(params, Sequence) else list(params)


def check_group(group: Any, others: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no group, or has a parameter of `others`. Reads a generator, whose parameters are in it after that."""
    if not isinstance(group, dict):
        raise ArgumentTypeError(f"a parameter group is a dict with 'params' and options, got {group!r:.80}.")
    if "params" not in group:
        raise ConfigError(f"a parameter group must have a 'params' key with its parameters, got the keys {sorted(group)}.")
    group["params"] = _read(group["params"])
    _refuse_duplicates([*others, group])


@contextmanager
def in_our_words(who: str) -> Iterator[None]:
    """What torch refuses within is an error of ours, of the same kind, that begins with who refuses."""
    try:
        yield
    except PhalanxError:
        raise
    except TypeError as error:
        raise ArgumentTypeError(f"{who}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{who}: {error}") from error


def _refuse_duplicates(listed: list[Any]) -> None:
    seen: dict[int, str] = {}
    for number, item in enumerate(listed):
        params = item["params"] if isinstance(item, Mapping) else [item]
        for place, param in enumerate([params] if isinstance(params, torch.Tensor) else params):
            tensor = param[1] if isinstance(param, tuple) and len(param) == 2 else param
            where = f"parameter {place} of group {number}" if isinstance(item, Mapping) else f"parameter {number}"
            if id(tensor) in seen:
                raise ConfigError(
                    f"some parameters appear in more than one parameter group, or twice in one: {where} is "
                    f"{seen[id(tensor)]} again. Nobody could say by which options it is to be stepped. Give each once."
                )
            seen[id(tensor)] = where


def _form(item: Any) -> type | None:
    if isinstance(item, torch.Tensor):
        return torch.Tensor
    if isinstance(item, Mapping):
        return dict
    return tuple if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else None


@dataclass(slots=True)
class ParamTable:
    """Every parameter, its group, its name for messages, and its spec, by number."""

    num_groups: int = 0
    params: list[torch.Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    specs: tuple[ParamSpec, ...] = ()
    index_of: dict[torch.Tensor, int] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> ParamTable:
        """The table of an optimizer's `param_groups`."""
        table = cls(num_groups=len(groups))
        for number, group in enumerate(groups):
            named = group.get("param_names")
            for place, param in enumerate(group["params"]):
                # For messages only. Parameters are matched by number, so names need not be the same on all ranks.
                name = named[place] if named else f"parameter {place} of group {number}"
                table.params.append(param)
                table.group_of.append(number)
                table.names.append(name)
        check_dense(zip(table.names, table.params, strict=True))
        table.specs = specs_of(list(zip(table.names, table.params, strict=True)))
        # Tensors are hashed by identity: two parameters with equal values stay two.
        table.index_of = {param: index for index, param in enumerate(table.params)}
        return table

    def in_current_dtypes(self) -> ParamTable:
        """The same parameters, which may have been converted since the table was made."""
        specs = tuple(replace(spec, dtype=param.dtype) for spec, param in zip(self.specs, self.params, strict=True))
        return replace(self, specs=specs)

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse groups whose lists of parameters were edited since: what is in them now has not been divided."""
        listed = [(number, id(param)) for number, group in enumerate(groups) for param in group["params"]]
        if listed == list(zip(self.group_of, map(id, self.params), strict=True)):
            return
        sizes = [len(group["params"]) for group in groups]
        known = [self.group_of.count(number) for number in range(self.num_groups)]
        raise ConfigError(
            f"the parameters in `param_groups` are not those that were divided among the ranks: groups of {sizes}, divided "
            f"were {known}. Use add_param_group() to add some and `requires_grad` to leave some out, or make the "
            "optimizer anew."
        )

    def check_apart(self) -> None:
        """Refuse two parameters over the same memory: ranks step parts of either, and what arrives last would win."""
        placed = [
            (param.data_ptr(), param.data_ptr() + spec.num_bytes, name)
            for param, spec, name in zip(self.params, self.specs, self.names, strict=True)
            # One with gaps in its memory (strides that the spec has not) may lie between the elements of another.
            if spec.numel and (tuple(param.stride()) == spec.stride or spec.numel == 1)
        ]
        placed.sort(key=lambda place: place[:2])
        for (_, end, name), (start, _, other) in pairwise(placed):
            if start < end:
                raise ConfigError(
                    f"{name} and {other} are two parameters over the same memory, of which each rank would step another "
                    "part. Make them one (`decoder.weight = encoder.weight`), or use a plain optimizer."
                )

    def by_group(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> list[list[torch.Tensor]]:
        """(parameter, tensor) pairs sorted into the groups of their parameters."""
        # Also for groups of which this rank owns nothing: the local optimizer has a group for each of the user's.
        groups: list[list[torch.Tensor]] = [[] for _ in range(self.num_groups)]
        for index, tensor in tensors:
            groups[self.group_of[index]].append(tensor)
        return groups


def check_dense(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse sparse parameters: nobody could say which elements they have."""
    for name, param in named:
        if param.layout != torch.strided:
            raise ConfigError(
                f"ZeroRedundancyOptimizer shards dense parameters, but {name} of shape {tuple(param.shape)} is "
                f"{param.layout}. Use a plain optimizer for it, or a dense parameter."
            )
