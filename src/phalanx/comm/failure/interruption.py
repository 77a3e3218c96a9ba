"""Waiting that somebody outside of the group can end.

A rank that waits in the store cannot see that the one it waits for has died: nothing connects the two yet. Whoever started
the ranks does see it. So a store may be given something to ask, an `Interruption`, and then everything that goes through the
store (agreements, rendezvous, gloo's own connecting, which waits in C++) ends at once with the error that this names.

What goes through no store, as gloo's connecting to an address that it has been told, is done by a thread that can be left
behind (`interruptible`). The transports notice a death by their own sockets, and are not slowed down by anything here.
Must not know who interrupts, nor why.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from ...errors import CommunicationError
from . import gloo_threads

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01
# A store that fails by the end of the rank that serves it fails a moment before whoever interrupts has heard of that end.
_GRACE_S = 0.5
_LOOK_S = 0.02
_LEAVING_S = 0.3  # whatever waits by the store ends by itself when that is interrupted


class Interruption(Protocol):
    """Somebody who knows when waiting has become pointless."""

    def error(self) -> CommunicationError | None:
        """What to raise wherever a rank waits; None while there is hope. Cheap, and from any thread."""


def awaited(interruption: Interruption, limit_s: float = _GRACE_S) -> CommunicationError | None:
    """The interruption's error, if it comes within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (error := interruption.error()) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return error


class Keys(Protocol):
    """What an `InterruptibleStore` needs of what it is made of: nothing of it waits for a key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def add(self, key: str, value: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...

    def num_keys(self) -> int: ...


class InterruptibleStore(dist.Store):
    """Keys and values, until they are interrupted. Whoever makes it holds it for as long as a group uses it.

    c10d calls a store written in Python by the names below, some of which differ between Python and C++. It holds only the
    C++ half: with the Python half gone, every call would fail.
    """

    # mypy: disable-error-code="override"
    # c10d declares some of these as several overloads, which no single Python signature matches.

    def __init__(self, keys: Keys, interruption: Interruption) -> None:
        super().__init__()
        self._inner = keys
        self._interruption = interruption

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(lambda: self._inner.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key, waited for until the store's time limit."""
        self.wait([key])
        return self._ask(lambda: self._inner.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, waited for as by `get`."""
        self.wait(keys)
        return self._ask(lambda: self._inner.multi_get(list(keys)))

    def add(self, key: str, value: int) -> int:
        """Count a key up."""
        return self._ask(lambda: self._inner.add(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key if it has the expected value; return what it has."""
        return self._ask(lambda: self._inner.compare_set(key, expected_value, desired_value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(lambda: bool(self._inner.check(list(keys))))

    def delete_key(self, key: str) -> bool:
        """Forget a key."""
        return self._ask(lambda: self._inner.delete_key(key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask(lambda: self._inner.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # as c10d's C++ code calls them

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in the stubs
        deadline, pause_s = time.monotonic() + limit.total_seconds(), _FIRST_PAUSE_S
        # Asked again and again: a wait of the store's own could not be ended.
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank has set all of {list(keys)} within {limit.total_seconds():g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, question: Callable[[], T]) -> T:
        error = self._interruption.error()
        if error is not None:
            raise error
        try:
            return question()
        except (RuntimeError, OSError) as failure:
            error = awaited(self._interruption)
            if error is None:
                raise
            raise error from failure


def interruptible(make: Callable[[], None], interruption: Interruption) -> None:
    """Call `make`, in a thread that is left behind if it is interrupted: it comes to nothing then, whenever it returns."""
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        _inside.is_so = True
        try:
            make()
        except BaseException as error:  # raised again where it is waited for
            raised.append(error)
        finally:
            done.set()

    # A daemon: the process may end before the connection that it waits for is given up.
    thread = threading.Thread(target=run, name="phalanx-joining", daemon=True)
    thread.start()
    try:
        while not done.wait(_LOOK_S):
            error = interruption.error()
            if error is not None and not done.wait(_LEAVING_S):
                raise error
    except BaseException:
        # Ctrl-C comes here as well, or whatever else a handler of signals raises.
        _give_up(thread)
        raise
    if raised:
        raise raised[0]


def is_interruptible() -> bool:
    """Whether what runs here is left behind when somebody interrupts: it need not watch anybody itself."""
    return getattr(_inside, "is_so", False)


_inside = threading.local()


def _give_up(thread: threading.Thread) -> None:
    # Not documented in Python's own library, but in its C API. Before the thread could make the group, which it may still
    # get from C++, the default one of this process: by then there may be another.
    assert thread.ident is not None, "it was started"
    gloo_threads.leave_behind(thread)
    # No class of ours: it may come when the thread is past all handlers, and of this one alone threads say no word.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
