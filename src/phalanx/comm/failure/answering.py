"""A store whose questions end, also when whoever serves it has stopped.

torch's TCPStore limits how long a key is waited for, and not how long the server takes to say anything at all. A rank 0 that
serves the store and is stopped (by a debugger, by a frozen machine) would hold every other rank in the very call by which
it asks who is missing. So such a question is put by a thread, and given up after the group's time limit; after that nobody
asks again, because the thread that was left behind holds the store's lock.

When a server has ended, c10d writes a stack of C++ frames to stderr for every question to it. Whoever asks gets the error,
and finds words for it, so that c10d is kept from its own meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Answer = TypeVar("Answer")


class SilentStoreError(RuntimeError):
    """The store has not answered within the time limit. A RuntimeError, as torch's own for a store that is gone."""


_SLICE_S = 1.0
_ERROR = 2  # as c10d numbers them; what it says of a connection that has ended is a warning, which is 1


def _find_level() -> ctypes.c_int | None:
    """How grave what torch's C++ code says must be to be written to stderr.

    `TORCH_CPP_LOG_LEVEL` sets it when torch is imported, which is before us; nothing but the variable itself, exported by
    torch's library, can be set later. Where it is not found, c10d speaks as before (tests/comm/failure/test_answering.py).
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


_level = _find_level()
_hushing = threading.Lock()
_num_hushed = _before = 0


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """While somebody is in here, c10d writes no warnings, in any thread. For moments: others' warnings are lost too."""
    global _num_hushed, _before
    if _level is None:
        yield
        return
    with _hushing:
        if not _num_hushed:
            _before = _level.value
            _level.value = max(_before, _ERROR)
        _num_hushed += 1
    try:
        yield
    finally:
        with _hushing:
            _num_hushed -= 1
            if not _num_hushed:
                _level.value = _before


class AnsweringStore:
    """The part of `dist.Store` that ranks need for notes. `may_hang`: another process serves it, over the network."""

    def __init__(self, store: dist.Store, may_hang: bool, limit_s: float) -> None:
        self._store = store
        self._may_hang = may_hang
        self._limit_s = limit_s
        self._silent = threading.Event()

    def prefixed(self, prefix: str) -> AnsweringStore:
        """The same store with other keys. Where one was not answered, the other one does not ask: they have one lock."""
        store = AnsweringStore(dist.PrefixStore(prefix, self._store), self._may_hang, self._limit_s)
        store._silent = self._silent
        return store

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(lambda: self._store.get(key))
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found: list[bytes] = self._ask(lambda: self._store.multi_get(list(keys)))
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._ask(lambda: self._store.compare_set(key, expected, desired))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def delete_key(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def together(self, questions: Callable[[dist.Store], Answer], lasting_s: float) -> Answer:
        """Several questions in a row for the price of one, as each may need a thread; they last `lasting_s` at most."""
        answer: Answer = self._ask(lambda: questions(self._store), lasting_s)
        return answer

    def _ask(self, question: Callable[[], Any], lasting_s: float = 0.0) -> Any:
        if not self._may_hang:
            return question()
        if self._silent.is_set():
            raise SilentStoreError(f"the store has not answered within {self._limit_s:g} s before")
        said: list[Any] = []
        raised: list[BaseException] = []

        def put() -> None:
            try:
                said.append(question())
            except BaseException as error:  # raised again where it was asked
                raised.append(error)

        # A daemon: the interpreter must not wait at its end for a server that has stopped.
        thread = threading.Thread(target=put, name="phalanx-store", daemon=True)
        # Here and not in the thread, which may stay in its question for ever.
        with hushed():
            thread.start()
            left_s = self._limit_s + lasting_s
            # In slices: who was stopped itself, with all others (Ctrl-Z), must not take that time for the server's.
            while thread.is_alive() and left_s > 0:
                slice_s = min(left_s, _SLICE_S)
                thread.join(slice_s)
                left_s -= slice_s
        if thread.is_alive():
            self._silent.set()
            raise SilentStoreError(f"the store has not answered within {self._limit_s:g} s")
        if raised:
            raise raised[0]
        return said[0]
