"""Extents: the pieces in which a memory file is reserved and mapped.

An extent is allocated in full when made (never by a later page fault), so that running out of memory is an
exception here and not a signal in the middle of a reduction. Large ones consist of huge pages where the
kernel has some: copying them takes a third less time. Knows nothing of what the memory is used for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import CommunicationError

ALIGNMENT = 64  # a cache line: two tensors never share one
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
# Not in Python's mmap; errors on Linux before 6.1 and 5.14.
_MADV_COLLAPSE = 25
_MADV_POPULATE_WRITE = 23


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return (num_bytes + alignment - 1) // alignment * alignment


@dataclass(frozen=True)
class Extent:
    start: int
    num_bytes: int
    memory: mmap.mmap
    bytes_view: torch.Tensor  # uint8 over the whole extent; keeps `memory` mapped
    address: int


def _map(fd: int, start: int, num_bytes: int) -> mmap.mmap:
    """Map a piece of a file; a large one, if possible, at an address at which huge pages can lie."""
    memory = mmap.mmap(fd, num_bytes, offset=start)
    excess = ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    if num_bytes < HUGE_PAGE_BYTES or excess == 0:
        return memory
    # Mappings are put one below the other, so one longer by the excess begins where it should. What
    # is mapped too much lies beyond the extent, where the file has room and no memory.
    memory.close()
    return mmap.mmap(fd, num_bytes + excess, offset=start)


def map_extent(fd: int, start: int, num_bytes: int) -> Extent:
    try:
        memory = _map(fd, start, num_bytes)
    except OSError as error:
        # A mapping holds a descriptor of its own.
        limit = "open files (ulimit -n)" if error.errno == errno.EMFILE else "address space (ulimit -v)"
        raise CommunicationError(
            f"cannot map {num_bytes} bytes of shared memory: {error}. Raise the limit on {limit}, or use fewer groups, "
            "or fewer ranks per host."
        ) from error
    bytes_view = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
    return Extent(start, num_bytes, memory, bytes_view, bytes_view.data_ptr())


def _available_bytes() -> int | None:
    """Memory the kernel could still give out, or None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reserve(fd: int, start: int, num_bytes: int) -> None:
    """Give the file's bytes [start, start + num_bytes) memory now, or raise saying how much was asked."""
    available = _available_bytes()
    remedy = "Use fewer ranks per host, smaller buckets, or a machine with more memory."
    # Asked in advance: the kernel answers an allocation it cannot meet by killing a process.
    if available is not None and num_bytes > available:
        raise CommunicationError(
            f"out of shared memory: asked for {num_bytes} bytes, {available} are available. {remedy}"
        )
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        raise CommunicationError(
            f"out of shared memory: asked for {num_bytes} bytes beyond the {start} in use: {error}. {remedy}"
        ) from error


def collapse(memory: mmap.mmap, at: int, num_bytes: int) -> None:
    """Bring the whole huge pages of a range together; extents of that size begin with one."""
    first, end = aligned(at, HUGE_PAGE_BYTES), (at + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < end:
        try:
            memory.madvise(_MADV_COLLAPSE, first, end - first)
        except OSError:
            pass  # no huge pages to be had: small ones do


def populate(memory: mmap.mmap, num_bytes: int) -> None:
    """Map all pages of a range that begins with the mapping now, not at the first touch of each."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE, 0, aligned(num_bytes, PAGE_BYTES))
    except OSError:
        pass  # an older kernel: touched, they come one by one


class MappedFile:
    """A memory file as this process has mapped it."""

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._starts: list[int] = []

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The `numel` elements at `offset`. Their owner must have published them since."""
        extent = self._extent(offset)
        begin = offset - extent.start
        return extent.bytes_view[begin : begin + numel * dtype.itemsize].view(dtype)

    def mapping(self, offset: int) -> tuple[mmap.mmap, int]:
        """The memory that holds `offset`, and where in it."""
        extent = self._extent(offset)
        return extent.memory, offset - extent.start

    def _extent(self, offset: int) -> Extent:
        return self._extents[bisect_right(self._starts, offset) - 1]

    def _append(self, extent: Extent) -> None:
        # In this order: a reader without the lock finds an extent through its start.
        self._extents.append(extent)
        self._starts.append(extent.start)
