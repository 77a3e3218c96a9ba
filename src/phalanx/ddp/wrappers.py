"""Which wrappers there are, for optimizers that want to join one: a wrapper need not know about them.

Holds nobody alive. Must not know of reducers or optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module import DistributedDataParallel

_wrappers: list[weakref.ref[DistributedDataParallel]] = []
_listeners: list[weakref.WeakMethod[Callable[..., Any]]] = []


def announce(wrapper: DistributedDataParallel) -> None:
    """A wrapper has been put together. Those who listen may raise, which refuses it."""
    _wrappers[:] = [known for known in _wrappers if known() not in (None, wrapper)]
    _wrappers.append(weakref.ref(wrapper))
    _listeners[:] = [listener for listener in _listeners if listener() is not None]
    for listener in list(_listeners):
        call = listener()
        if call is not None:
            call(wrapper)


def listen(method: Callable[[DistributedDataParallel], None]) -> None:
    """Call a bound method with every wrapper put together from now on, as long as its object lives."""
    _listeners.append(weakref.WeakMethod(method))


def verify_all() -> None:
    """Return when every wrapper's backwards are known to have averaged what belonged together; raise if one has not."""
    for wrapper in known_wrappers():
        wrapper.verify()


def known_wrappers() -> list[DistributedDataParallel]:
    """The wrappers that are alive, the latest first."""
    alive = [known() for known in reversed(_wrappers)]
    return [wrapper for wrapper in alive if wrapper is not None]
