"""Tensors inside whatever a model takes and returns: lists, tuples, mappings, dataclasses, RRefs.

Must not know of reduction.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..optim.engine import nests, node_number, nodes_from
from .frames import untraced

_PACKED = ("data", "sorted_indices", "unsorted_indices")


def _local_value(value: Any) -> Any:
    """What an RRef of this process refers to; anything else is itself."""
    if type(value).__name__ in ("RRef", "PyRRef") and hasattr(value, "local_value"):
        return value.local_value() if value.is_owner() else None
    return value


# Values into which nobody has to look for tensors.
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type)


def _parts(value: Any) -> Iterator[Any]:
    """Every tensor reachable from `value` through containers, dataclasses and local RRefs; other objects as they are."""
    seen: set[int] = set()  # of containers, which may hold themselves
    waiting = [value]
    while waiting:
        value = _local_value(waiting.pop())
        if isinstance(value, (torch.Tensor, *_PLAIN)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            inside = _inside(value)
            if inside is None:
                yield value
            else:
                waiting += inside


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor reachable from `value`, in an order that depends on its structure alone."""
    return [part for part in _parts(value) if isinstance(part, torch.Tensor)]


def _inside(value: Any) -> list[Any] | None:
    """What a container or a dataclass holds; None for another object, or one that does not let us look."""
    try:
        if isinstance(value, (list, tuple, set)):
            return [item for item in value if type(item) not in _PLAIN_TYPES]
        if isinstance(value, Mapping):
            return list(value.values())
        if dataclasses.is_dataclass(value):
            return [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    except Exception:  # a user's own container may raise anything, which is no reason to fail a forward
        return None
    return None


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor changed, in containers of the same types; other objects as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        # Its batch sizes stay on the CPU, whatever happens to the rest.
        return value._replace(**{name: map_tensors(getattr(value, name), change) for name in _PACKED})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(changed, each.name, map_tensors(getattr(value, each.name), change))
        return changed
    return value


def with_own_tensors(value: Any, inputs: Any) -> Any:
    """`value` with a copy in place of every tensor that is one of `inputs`, handed through as it is."""
    handed = {id(tensor) for tensor in tensors_in(inputs) if tensor.requires_grad}
    if not handed or handed.isdisjoint(map(id, tensors_in(value))):
        return value
    # Not a view: a change in place would put another node in the place of the one that is watched.
    return map_tensors(value, lambda tensor: tensor.clone() if id(tensor) in handed else tensor)


def may_nest(value: Any) -> bool:
    """Whether a backward through `value` may run another backward inside: reentrant checkpointing does.

    A look at the whole graph, about a microsecond per node. Other functions of users that run a backward inside theirs
    cannot be told from those that do not.
    """
    roots = [part.grad_fn for part in _parts(value) if isinstance(part, torch.Tensor)]
    return any(map(nests, nodes_from(roots)))


@dataclasses.dataclass(frozen=True, slots=True)
class Watched:
    """How many tensors are watched, the numbers of their nodes, and whether there can be no others."""

    num_tensors: int
    nodes: tuple[int, ...]
    sees_all: bool


def watch(value: Any, on_backward: Callable[[], None]) -> Watched:
    """Call `on_backward` when a backward pass reaches a tensor of `value`.

    A tensor without history (a parameter or an input handed through) is watched for one pass only,
    so that repeated forwards leave no hooks behind on it.
    """
    num_watched, sees_all, nodes = 0, True, list[int]()
    for part in (value,) if type(value) is torch.Tensor else _parts(value):
        if not isinstance(part, torch.Tensor):
            sees_all = sees_all and isinstance(part, _PLAIN)
        elif part.requires_grad:
            num_watched += 1
            starter = _Starter(on_backward)
            handle = part.register_hook(starter)
            node = part.grad_fn
            if node is None:
                starter.handle = handle
            else:
                nodes.append(node_number(node))
    return Watched(num_watched, tuple(nodes), sees_all)


class _Starter:
    """A tensor hook that announces a backward pass and leaves the gradient as it is."""

    __slots__ = ("handle", "on_backward")

    def __init__(self, on_backward: Callable[[], None]) -> None:
        self.on_backward = on_backward
        self.handle: Any = None

    @untraced
    def __call__(self, _grad: torch.Tensor) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        self.on_backward()
