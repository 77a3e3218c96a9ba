"""Tensors and texts in files of memory that several processes see. Must not know whose they are, nor when they are right."""

from __future__ import annotations

import mmap
import os
import pickle

import torch

from ..comm.memory.extent import HUGE_PAGE_BYTES, PAGE_BYTES, aligned, collapse, map_extent, populate
from ..errors import StateError
from ..launch.elastic.heads import HEAD_BYTES, Paths, Progress
from .layout import Leaf, Text


def grow(descriptor: int, num_bytes: int) -> torch.Tensor:
    """A file's first bytes, `num_bytes` or some more, all of which have memory now: huge pages where the kernel has some.

    In the midst of training each first touch of a page would be a fault; and optimizers pass over their state a dozen
    times, which takes a fifth less time in huge pages. Raises OSError if there is no memory.
    """
    granule = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    whole = aligned(max(num_bytes, 1), granule)
    os.posix_fallocate(descriptor, 0, whole)
    # Room without memory behind it, which a mapping at an address for huge pages may need.
    os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, whole + HUGE_PAGE_BYTES))
    extent = map_extent(descriptor, 0, whole)
    collapse(extent.memory, 0, whole)
    populate(extent.memory, whole)
    return extent.bytes_view


def map_whole(descriptor: int) -> torch.Tensor:
    """All of a file, as bytes that outlive whoever writes them. The tensor keeps the mapping, not the descriptor."""
    num_bytes = os.fstat(descriptor).st_size
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def map_path(path: str) -> torch.Tensor:
    """The same of a file that another process holds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_whole(descriptor)
    finally:
        os.close(descriptor)


def map_grown(path: str, num_bytes: int) -> torch.Tensor:
    """The first bytes of a file that another process has let grow, to be read in every step."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        extent = map_extent(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    populate(extent.memory, num_bytes)
    return extent.bytes_view


def view_file(path: str, size: int) -> memoryview:
    """A file's first bytes, to be read only."""
    if not size:
        return memoryview(bytearray())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A private copy, as torch wants memory that it might write to. It is only read, so that no page is copied.
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)


def read_bytes(path: str, at: int, size: int) -> bytes:
    """A part of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, at)
    finally:
        os.close(descriptor)


def view_of(memory: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """A tensor in a file."""
    return memory[leaf.at : leaf.at + leaf.num_bytes].view(getattr(torch, leaf.dtype)).view(leaf.shape)


def read_progress(paths: Paths) -> Progress:
    """How far a rank's state in place has come."""
    found = Progress.of(read_bytes(paths.head, 0, HEAD_BYTES))
    if found is None:
        raise StateError("a rank has nothing in place that others could take or finish.")
    return found


def read_text(paths: Paths) -> Text:
    """What lies where in a rank's file."""
    progress = read_progress(paths)
    text: Text = pickle.loads(read_bytes(paths.place, progress.text_at, progress.text_bytes))
    return text
