"""This process's shared memory for users: the segment in which buckets and parameters live.

One arena per process, not per group: a tensor allocated through one group lies in shared memory for
every other group too, and peers map it once. The arena lives as long as a group uses it; tensors
stay valid after that, as ordinary memory.
"""

from __future__ import annotations

import os
import threading
import weakref

from .arena import Arena

_lock = threading.Lock()
_arena: weakref.ref[Arena] | None = None


def process_memory() -> Arena:
    """The arena from which this process hands out tensors. The caller keeps it alive."""
    global _arena
    with _lock:
        arena = _arena() if _arena is not None else None
        if arena is None:
            arena = Arena("phalanx-memory")
            _arena = weakref.ref(arena)
        return arena


def trim_shared() -> None:
    """Give back once what is free now: what only the first step needed."""
    arena = _arena() if _arena is not None else None
    if arena is not None:
        arena.trim()


def _forget_after_fork() -> None:
    # A child shares its parent's pages, so what it allocated there would overwrite the parent's
    # tensors. It gets an arena of its own; tensors it inherited stay readable.
    global _arena, _lock
    _arena = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
