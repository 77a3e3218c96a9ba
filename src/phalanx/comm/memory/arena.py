"""Memory that several processes can map: anonymous memory files which grow with use.

`Arena` is a process's own memory file and the allocator on top of it; `PeerArena` is the same
file seen from another process. A place in an arena is an `offset` from its beginning, the same
number in every process, whereas addresses differ. This module knows nothing of ranks or
collectives.

The file has no name: it is reached only through its descriptor, and the kernel frees it with the
last process that maps it, so a crash leaves nothing behind. It grows by extents; the first page lists
them, so that a peer maps an extent when first told of an offset inside it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

import torch

from ...errors import CommunicationError
from .extent import HUGE_PAGE_BYTES, PAGE_BYTES, Extent, MappedFile, aligned, collapse, map_extent, reserve

_MIN_EXTENT_BYTES = 1 << 20
_RETURNED_BYTES = 1 << 20  # free places from this size on go back to the kernel when they do not fit
_TABLE_ROW = struct.Struct("<QQ")  # first byte and number of bytes of one extent
_TABLE_ROWS = PAGE_BYTES // _TABLE_ROW.size - 1


@dataclass
class _FreeList:
    """Free places of an arena, by offset; neighbours inside one extent are merged."""

    starts: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)

    def take(self, num_bytes: int) -> int | None:
        """The lowest place with room for `num_bytes`, or None."""
        for index, start in enumerate(self.starts):
            length = self.lengths[start]
            if length >= num_bytes:
                del self.starts[index], self.lengths[start]
                if length > num_bytes:
                    self._add(start + num_bytes, length - num_bytes)
                return start
        return None

    def give(self, start: int, num_bytes: int, extent_starts: list[int]) -> None:
        """Return a place. Pieces of two extents are never merged: they are not adjacent in memory."""
        index = bisect_right(self.starts, start)
        if index < len(self.starts) and self.starts[index] == start + num_bytes not in extent_starts:
            num_bytes += self.lengths.pop(self.starts.pop(index))
        if index > 0 and start not in extent_starts:
            before = self.starts[index - 1]
            if before + self.lengths[before] == start:
                self.lengths[before] += num_bytes
                return
        self._add(start, num_bytes)

    def items(self) -> list[tuple[int, int]]:
        """Every free place and its length."""
        return list(self.lengths.items())

    def _add(self, start: int, num_bytes: int) -> None:
        insort(self.starts, start)
        self.lengths[start] = num_bytes


class Arena(MappedFile):
    """This process's own shared memory. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        # The name shows in /proc/<pid>/maps and nowhere else: it opens nothing.
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._closer = weakref.finalize(self, os.close, self.fd)
        self._closer.atexit = False
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._free = _FreeList()
        # Freed by finalizers, which run at any moment in any thread, even inside `allocate` with
        # the lock held; appending to a deque needs no lock.
        self._returned: deque[tuple[int, int]] = deque()
        self._retired: set[int] = set()
        self._has_holes = False
        reserve(self.fd, 0, PAGE_BYTES)
        self._table = map_extent(self.fd, 0, PAGE_BYTES)
        self._end = PAGE_BYTES
        self._num_bytes = PAGE_BYTES

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed flat tensor with a storage of its own; its memory returns with the last view."""
        num_bytes = aligned(max(1, numel * dtype.itemsize))
        offset, fresh = self._take(num_bytes)
        memory, at = self.mapping(offset)
        block = (ctypes.c_char * num_bytes).from_buffer(memory, at)
        # The tensor's storage holds `block`, and `block` the mapping.
        weakref.finalize(block, self._returned.append, (offset, num_bytes)).atexit = False
        tensor = torch.frombuffer(block, dtype=dtype, count=max(1, numel))
        if not fresh:
            tensor.zero_()
        return tensor[:numel]

    def locate(self, tensor: torch.Tensor) -> int | None:
        """The offset of a tensor's first element, or None if it lies elsewhere."""
        address = tensor.data_ptr()
        for extent in self._extents:
            if 0 <= address - extent.address < extent.num_bytes:
                return extent.start + address - extent.address
        return None

    def retire(self, tensor: torch.Tensor) -> None:
        """Never hand out again the block that holds `tensor`, if it lies here.

        For memory which a peer of a failed collective may still write to: that peer is stopped or
        slow, and would destroy whatever the block was given to next.
        """
        offset = self.locate(tensor)
        if offset is not None:
            self._retired.add(offset)

    @property
    def num_bytes(self) -> int:
        """How much memory the file has."""
        return self._num_bytes

    def close(self) -> None:
        """Let go of the descriptor. Tensors handed out, and what peers have mapped, stay valid."""
        self._closer()

    def trim(self) -> None:
        """Give the kernel the pages of what has been freed. They come back when they are needed."""
        if os.getpid() == self._owner_pid:
            with self._lock:
                self._collect()
                self._return_free()

    def _collect(self) -> None:
        while self._returned:
            self._give_back(*self._returned.popleft())

    def _take(self, num_bytes: int) -> tuple[int, bool]:
        if os.getpid() != self._owner_pid:
            raise CommunicationError(
                "shared memory of a parent process used after fork. Make process groups in the child itself."
            )
        with self._lock:
            self._collect()
            offset = self._free.take(num_bytes)
            if offset is not None:
                if self._has_holes:
                    self._refill(offset, num_bytes)
                return offset, False
            self._return_free()
            self._grow(num_bytes)
            offset = self._free.take(num_bytes)
            assert offset is not None, "an extent just made has room for what it was made for"
            return offset, True

    def _give_back(self, start: int, num_bytes: int) -> None:
        if not any(start <= offset < start + num_bytes for offset in self._retired):
            self._free.give(start, num_bytes, self._starts)

    def _refill(self, offset: int, num_bytes: int) -> None:
        """Memory for a free place, whose pages may have gone back to the kernel."""
        try:
            reserve(self.fd, offset, num_bytes)
        except CommunicationError:
            self._free.give(offset, num_bytes, self._starts)
            raise
        collapse(*self.mapping(offset), num_bytes)

    def _return_free(self) -> None:
        """Give the kernel the pages of free places: they did not fit, so their memory should not count twice."""
        for start, num_bytes in self._free.items():
            first, end = aligned(start, PAGE_BYTES), (start + num_bytes) // PAGE_BYTES * PAGE_BYTES
            if num_bytes >= _RETURNED_BYTES and first < end:
                memory, at = self.mapping(first)
                memory.madvise(mmap.MADV_REMOVE, at, end - first)
                self._has_holes = True

    def _grow(self, num_bytes: int) -> None:
        if len(self._extents) == _TABLE_ROWS:
            raise CommunicationError(
                f"shared memory in {_TABLE_ROWS} pieces cannot grow by {num_bytes} bytes more. "
                "Allocate fewer, larger tensors."
            )
        # By an eighth at least, which keeps the extents few and what is held close to what is used.
        try:
            extent = self._make_extent(max(num_bytes, self._num_bytes // 8, _MIN_EXTENT_BYTES))
        except CommunicationError:
            extent = self._make_extent(num_bytes)
        # The row before the count: a peer reads as many rows as the count says. It does so only after a signal
        # that tells it of an offset in the new extent, which orders these stores before its loads.
        row = len(self._extents)
        _TABLE_ROW.pack_into(self._table.memory, (row + 1) * _TABLE_ROW.size, extent.start, extent.num_bytes)
        _TABLE_ROW.pack_into(self._table.memory, 0, row + 1, 0)
        self._append(extent)
        self._free.give(extent.start, extent.num_bytes, self._starts)
        self._num_bytes += extent.num_bytes

    def _make_extent(self, num_bytes: int) -> Extent:
        granule = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        start, num_bytes = aligned(self._end, granule), aligned(num_bytes, granule)
        try:
            reserve(self.fd, start, num_bytes)
            os.ftruncate(self.fd, start + num_bytes + HUGE_PAGE_BYTES)  # the room that `_map` may need
            extent = map_extent(self.fd, start, num_bytes)
        except CommunicationError:
            os.ftruncate(self.fd, start)  # give back what was reserved
            raise
        self._end = start + num_bytes
        collapse(extent.memory, 0, num_bytes)
        return extent


class PeerArena(MappedFile):
    """Another process's arena, mapped as far as it was needed.

    One object per memory file, however many groups attach to it: see `attach`.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        # Not at exit, when the kernel closes it anyway and Python no longer runs in a known order.
        weakref.finalize(self, os.close, fd).atexit = False
        self._lock = threading.Lock()
        self._table = map_extent(fd, 0, PAGE_BYTES)

    @classmethod
    def attach(cls, fd: int) -> PeerArena:
        """The arena behind a descriptor received from its owner; takes over the descriptor."""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        with _attach_lock:
            arena = _attached.get(identity)
            if arena is None:
                arena = _attached[identity] = cls(fd)
            else:
                os.close(fd)
            return arena

    def _extent(self, offset: int) -> Extent:
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset >= self._extents[index].start + self._extents[index].num_bytes:
            self._map_published()
        return super()._extent(offset)

    def _map_published(self) -> None:
        with self._lock:
            (num_extents, _) = _TABLE_ROW.unpack_from(self._table.memory, 0)
            for row in range(len(self._extents), num_extents):
                start, num_bytes = _TABLE_ROW.unpack_from(self._table.memory, (row + 1) * _TABLE_ROW.size)
                self._append(map_extent(self._fd, start, num_bytes))


_attach_lock = threading.Lock()
_attached: weakref.WeakValueDictionary[tuple[int, int], PeerArena] = weakref.WeakValueDictionary()
