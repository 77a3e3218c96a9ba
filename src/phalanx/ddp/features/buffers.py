"""Buffers kept alike on all ranks: from one rank before each forward, or as a user's hook does it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...comm.replicate import replicate

_BUFFERS, _CHILDREN, _VALUES = attrgetter("_buffers"), attrgetter("_modules"), methodcaller("values")


class BufferHookLocation(enum.Enum):
    """When a buffer hook runs, relative to the wrapped module's forward."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass(frozen=True, slots=True)
class BufferHook:
    """hook(state, named_buffers) may return futures, which are waited for at once."""

    hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    state: Any
    location: BufferHookLocation


class BufferSync:
    """The buffers of one module. They are looked up at each use: users reassign them, and add and remove layers."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self._ignored = frozenset(ignored)
        self.hook: BufferHook | None = None
        # The module and all below it, in the order of `named_modules`; what stands before the names of their buffers; and
        # their children when this was put together.
        self._modules = [module]
        self._prefixes = [""]
        self._children: list[list[torch.nn.Module | None]] = []

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, shared ones once, ignored ones left out."""
        if _children_of(self._modules) != self._children:
            self._look_through()
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, buffers in zip(self._prefixes, map(_BUFFERS, self._modules), strict=True):
            if buffers:
                for name, buffer in buffers.items():
                    full = prefix + name
                    if buffer is not None and id(buffer) not in seen and full not in self._ignored:
                        seen.add(id(buffer))
                        found[full] = buffer
        return found

    def _look_through(self) -> None:
        """Layers have been added or removed since the last time."""
        named = list(self._modules[0].named_modules())
        self._prefixes = [f"{name}." if name else "" for name, _ in named]
        self._modules = [module for _, module in named]
        self._children = _children_of(self._modules)

    def in_order(self) -> list[torch.Tensor]:
        """The same, in an order that does not depend on when each was registered on this rank."""
        named = self.named()
        return [named[name] for name in sorted(named)]

    def due(self, location: BufferHookLocation) -> bool:
        """Whether buffers are synchronised at this place of a forward. Without a hook: before it."""
        chosen = BufferHookLocation.PRE_FORWARD if self.hook is None else self.hook.location
        return location is chosen

    def run(self, collectives: Collectives, source: int) -> None:
        """Synchronise now: by the user's hook if there is one, else from rank `source`."""
        if self.hook is None:
            if tensors := self.in_order():
                replicate(tensors, collectives, source, "synchronising buffers")
            return
        named = self.named()
        if not named:
            return
        futures = self.hook.hook(self.hook.state, named)
        if futures is not None:
            torch.futures.wait_all(list(futures) if isinstance(futures, (list, tuple)) else [futures])


def _children_of(modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Module | None]]:
    # Without a line of Python per module: it is asked before each forward.
    return list(map(list, map(_VALUES, map(_CHILDREN, modules))))
