"""This process's shared memory for users: the segment in which buckets and parameters live.

One arena a process, not a group: a tensor allocated through one group lies in shared memory for
every other group too, and peers map it once.
"""

from __future__ import annotations

import os
import threading

from phalanx.comm.shm.arena import Arena

_lock = threading.Lock()
_arena: Arena | None = None


def process_memory() -> Arena:
    """The arena from which this process hands out tensors; made on first asking."""
    global _arena
    with _lock:
        if _arena is None:
            _arena = Arena("phalanx-memory")
        return _arena


def _forget_after_fork() -> None:
    # A child shares its parent's pages, so what it allocated there would overwrite the parent's
    # tensors. It gets an arena of its own; tensors it inherited stay readable.
    global _arena, _lock
    _arena = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
