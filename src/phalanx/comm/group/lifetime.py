"""Groups that are still open at the end of the process, or in a forked child: closed or abandoned here."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import weakref
from typing import Protocol

# Before ours is registered, so that it comes after: gloo's threads may be at work until the last group is closed.
from ..failure import gloo_threads  # noqa: F401


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


def _close_all_in_child() -> None:
    if multiprocessing.parent_process() is not None:
        _close_all()


# At import, so that threads and exit functions of the user's program may still use its groups: `atexit` runs when threads
# have been joined, and what was registered last first. Our own threads are daemons, which are not joined there.
atexit.register(_close_all)
# multiprocessing's children do not run `atexit` at all. The private hook that concurrent.futures uses comes before threads
# are joined; there is none after that.
threading._register_atexit(_close_all_in_child)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_abandon_all)
