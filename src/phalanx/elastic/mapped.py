"""Tensors and texts in files of memory that several processes see. Must not know whose they are, nor when they are right."""

from __future__ import annotations

import mmap
import os
import pickle

import torch

from ..errors import StateError
from ..launch.elastic.heads import HEAD_BYTES, Paths, Progress
from .image import read_bytes
from .layout import Leaf, Text


def map_whole(descriptor: int, populates: bool = False) -> torch.Tensor:
    """All of a file, as bytes that outlive whoever writes them. The tensor keeps the mapping, not the descriptor."""
    num_bytes = os.fstat(descriptor).st_size
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # Populated: in the midst of training each first touch of a page would be a fault.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populates else 0)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags=flags), dtype=torch.uint8)


def map_path(path: str, populates: bool = False) -> torch.Tensor:
    """The same of a file that another process holds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_whole(descriptor, populates)
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
