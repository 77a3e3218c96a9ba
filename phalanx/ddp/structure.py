"""Tensors inside whatever a model takes and returns: lists, tuples, mappings, dataclasses, RRefs.

Must not know of reduction.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .frames import untraced

_PACKED = ("data", "sorted_indices", "unsorted_indices")


def _local_value(value: Any) -> Any:
    """What an RRef of this process refers to; anything else is itself."""
    if type(value).__name__ in ("RRef", "PyRRef") and hasattr(value, "local_value"):
        return value.local_value() if value.is_owner() else None
    return value


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor reachable from `value` through containers, dataclasses and local RRefs."""
    value = _local_value(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from find_tensors(getattr(value, each.name))


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


def watch(value: Any, on_backward: Callable[[], None]) -> int:
    """Call `on_backward` when a backward pass reaches a tensor of `value`; returns how many are watched.

    A tensor without history (a parameter or an input handed through) is watched for one pass only,
    so that repeated forwards leave no hooks behind on it.
    """
    count = 0
    for tensor in find_tensors(value):
        if not tensor.requires_grad:
            continue
        count += 1
        if tensor.grad_fn is not None:
            tensor.register_hook(_Starter(on_backward))
        else:
            starter = _Starter(on_backward)
            starter.handle = tensor.register_hook(starter)
    return count


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
