"""Buffers kept alike on all ranks: from one rank before each forward, or as a user's hook does it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...comm.replicate import replicate


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
        self._module = module
        self._ignored = frozenset(ignored)
        self.hook: BufferHook | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, shared ones once, ignored ones left out."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        # By a stack, in the order of `named_modules`: that is a generator per level, and this runs before each forward.
        stack = [("", self._module)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, buffer in module._buffers.items():
                full = prefix + name
                if buffer is not None and id(buffer) not in seen and full not in self._ignored:
                    seen.add(id(buffer))
                    found[full] = buffer
            if module._modules:
                children = reversed(module._modules.items())
                stack += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
        return found

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
