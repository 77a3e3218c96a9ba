"""Which wrappers there are, for optimizers that want to join one: a wrapper need not know about them.

Holds nobody alive. Must not know of reducers or optimizers.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .module import DistributedDataParallel


class WrapperListener(Protocol):
    """Who wants to hear of every wrapper put together."""

    def concerns(self, wrapper: DistributedDataParallel) -> bool:
        """Whether the wrapper has anything to do with it."""

    def consider(self, wrapper: DistributedDataParallel) -> None:
        """A wrapper has been put together. It may raise, which refuses the wrapper."""


_wrappers: list[weakref.ref[DistributedDataParallel]] = []
_listeners: list[weakref.ref[WrapperListener]] = []


def announce(wrapper: DistributedDataParallel) -> None:
    """A wrapper has been put together. Those who listen may raise, which refuses it."""
    _wrappers[:] = [known for known in _wrappers if known() not in (None, wrapper)]
    _wrappers.append(weakref.ref(wrapper))
    if any(listener.concerns(wrapper) for listener in _alive()):
        # Optimizers are part of cycles: one that was dropped may still be there, on some ranks only, and would join.
        gc.collect()
    for listener in _alive():
        listener.consider(wrapper)


def _alive() -> list[WrapperListener]:
    _listeners[:] = [known for known in _listeners if known() is not None]
    found = [known() for known in _listeners]
    return [listener for listener in found if listener is not None]


def listen(listener: WrapperListener) -> None:
    """Tell `listener` of every wrapper put together from now on, as long as it lives."""
    _listeners.append(weakref.ref(listener))


def verify_all() -> None:
    """Return when every wrapper's backwards are known to have averaged what belonged together; raise if one has not."""
    for wrapper in known_wrappers():
        wrapper.verify()


def known_wrappers() -> list[DistributedDataParallel]:
    """The wrappers that are alive, the latest first."""
    alive = [known() for known in reversed(_wrappers)]
    return [wrapper for wrapper in alive if wrapper is not None]
