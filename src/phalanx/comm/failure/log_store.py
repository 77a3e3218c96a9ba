"""A store in a file in memory that survives the death of whoever writes to it, at any instruction.

torch's FileStore does not: half a record of a rank that was killed lets every other rank read for ever, in C++, and its
destructor opens the file once more by its path, which may mean another file by then (the launcher has closed it). Here the
file is opened once, and a record counts only when it is whole.

    bytes 0 to 7     how many bytes of records there are: written after the record, by one store
    from byte 4096   records: length of the key, length of the value (-1: the key is deleted), key, value

A writer holds the file's lock, and writes over what one before it has left half done. Readers need no lock. A lock whose
holder is stopped is waited for only until the interruption. Must not know what the keys mean.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence

from .interruption import Interruption

_RECORD = struct.Struct("<iq")
_DELETED = -1
_PAUSE_S = 0.0005


class LogStore:
    """What `InterruptibleStore` needs of a store. For any thread of this process; others open the path themselves."""

    def __init__(self, path: str, interruption: Interruption) -> None:
        self._interruption = interruption
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        # Grows it, if nobody has yet, and never shrinks it.
        os.posix_fallocate(self._file, 0, mmap.PAGESIZE)
        # A native word, read and written by one instruction each.
        self._end = memoryview(mmap.mmap(self._file, mmap.PAGESIZE)).cast("q")
        self._read_to = 0
        self._values: dict[str, bytes] = {}
        self._turn = threading.RLock()

    # -- reading -------------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._now() for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._now()[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        values = self._now()
        return [values[key] for key in keys]

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._now())

    def _now(self) -> dict[str, bytes]:
        with self._turn:
            end = self._end[0]
            while self._read_to < end:
                data = os.pread(self._file, end - self._read_to, mmap.PAGESIZE + self._read_to)
                self._take(data)
            return self._values

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            num_key, num_value = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            key = data[at : at + num_key].decode()
            at += num_key
            if num_value == _DELETED:
                self._values.pop(key, None)
            else:
                self._values[key] = data[at : at + num_value]
                at += num_value
        self._read_to += len(data)

    # -- writing -------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with self._turn:
            self._lock()
            try:
                self._append(key, value if isinstance(value, bytes) else value.encode())
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def add(self, key: str, value: int) -> int:
        """Count a key up; the number is kept as text."""
        with self._turn:
            self._lock()
            try:
                total = int(self._now().get(key, b"0")) + value
                self._append(key, str(total).encode())
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, or is not there and none is expected; return what it has then."""
        wanted, new = (one if isinstance(one, bytes) else one.encode() for one in (expected, desired))
        with self._turn:
            self._lock()
            try:
                found = self._now().get(key)
                if found == wanted or (found is None and not wanted):
                    self._append(key, new)
                    return new
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            return wanted if found is None else found

    def delete_key(self, key: str) -> bool:
        """Forget a key. Whether it was there."""
        with self._turn:
            self._lock()
            try:
                was_there = key in self._now()
                if was_there:
                    self._append(key, None)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            return was_there

    def _lock(self) -> None:
        while True:
            try:
                # Of this process's own opening of the file: threads of one process have `_turn`.
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                error = self._interruption.error()
                if error is not None:
                    raise error from None
                time.sleep(_PAUSE_S)

    def _append(self, key: str, value: bytes | None) -> None:
        """This rank has the lock."""
        name = key.encode()
        record = _RECORD.pack(len(name), _DELETED if value is None else len(value)) + name + (value or b"")
        end, view = self._end[0], memoryview(record)
        written = 0
        while written < len(record):
            written += os.pwrite(self._file, view[written:], mmap.PAGESIZE + end + written)
        # Only now does it count.
        self._end[0] = end + len(record)
