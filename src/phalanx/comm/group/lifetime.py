"""Groups that are still open at the end of the process, or in a forked child: closed or abandoned here."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from typing import Protocol


class Closable(Protocol):
    """Something with threads and descriptors of its own."""

    def close(self) -> None:
        """Give everything back, and tell whoever needs to know."""

    def abandon(self) -> None:
        """Give everything back without a word, in a forked child."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(closable: Closable) -> None:
    """Close `closable` when the interpreter ends, and abandon it in forked children."""
    _open.add(closable)


def _close_all() -> None:
    for closable in list(_open):
        closable.close()


def _abandon_all() -> None:
    for closable in list(_open):
        closable.abandon()
    _open.clear()
    _keep_inherited()


def _keep_inherited() -> None:
    """In a forked child: never destroy the groups that it has from its parent, gloo's above all.

    Their destructors join threads that a fork does not copy, so that a child which ends as a script does (`sys.exit`) would
    wait in there for ever. What is kept is memory of the parent's, until the child ends.
    """
    # Those that were destroyed and are garbage in a cycle as well, as after a change of ranks in an elastic run: the child's
    # collector must not come to them.
    gc.freeze()
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    # Private, but all groups are in it; tests/processes/test_starts.py notices if it moves.
    for group in list(distributed._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# The private hook rather than `atexit`: threads are joined before `atexit` runs, and multiprocessing's
# children join their threads without running `atexit` at all. concurrent.futures does the same.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_abandon_all)
