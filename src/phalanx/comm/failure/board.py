"""Who failed, and what they said: notes that ranks leave for each other in the group's store.

A collective that fails tells a rank that something is wrong, rarely who. The ranks of a group
therefore write to the c10d store they already share: a rank that raises posts its message before it
goes, and ranks whose collective failed call the roll. Nothing is written on the healthy path.
Must not know of steps, buckets or parameters beyond the text it is given.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from ...errors import CommunicationError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said before it left."""

    rank: int
    when: float
    message: str


class FailureBoard:
    """The notes of one process group. Every call is bounded in time and raises nothing of the store's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world = group.size()
        self._store = dist.PrefixStore("phalanx/failures", _store_of(group))
        # A rank's first error is the cause; those after it are consequences, and would only cover it up.
        self._posted = False
        self.last_words: str | None = None  # what this rank posted last, retracted or not

    def announce_uncaught(self) -> None:
        """Post the exception that ends this process, should one do so."""
        _watched.add(self)
        _watch_child_process()
        if sys.excepthook is not _announce:
            _previous.append(sys.excepthook)
            sys.excepthook = _announce

    def post_error(self, error: BaseException, doing: str = "") -> None:
        """Leave `error` for the others, unless it only says that another rank failed."""
        # Whoever posts an error about another rank would be taken for the rank at fault.
        if not isinstance(error, CommunicationError):
            self.post_failure(f"{type(error).__name__}{doing}: {error}")

    def post_failure(self, message: str) -> None:
        """Leave this rank's own message for the others; later posts of the same rank are ignored."""
        note = json.dumps({"when": time.time(), "message": message[:4000]})
        try:
            if not self._posted:
                self._posted, self.last_words = True, message
                self._store.set(f"failed/{self.rank}", note)
        except (RuntimeError, OSError):
            pass  # The store died with the rank that hosted it; the others will notice that themselves.

    def retract_failure(self) -> None:
        """This rank goes on after all: it caught what it had posted."""
        if self._posted:
            self._posted = False
            with contextlib.suppress(RuntimeError, OSError):
                self._store.delete_key(f"failed/{self.rank}")

    def failures(self) -> list[Failure]:
        """What other ranks posted, the earliest first."""
        found = []
        try:
            for rank in range(self.world):
                if rank != self.rank and self._store.check([f"failed/{rank}"]):
                    note = json.loads(self._store.get(f"failed/{rank}"))
                    found.append(Failure(rank, note["when"], note["message"]))
        except (RuntimeError, OSError):
            pass
        # By each rank's own clock: the order between hosts is as good as their clocks.
        return sorted(found, key=lambda failure: failure.when)

    def raise_alarm(self) -> None:
        """Make every rank that waits for a collective look up and answer the roll."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set("alarm", str(self.rank))

    def calm(self) -> None:
        """Everybody answered: the alarm is over."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.delete_key("alarm")

    def is_alarmed(self) -> bool:
        """Whether some rank's collective failed, or a rank said that it did."""
        try:
            return bool(self._store.check(["alarm"])) or bool(self.failures())
        except (RuntimeError, OSError):
            return True  # the store is gone, and its host with it

    def exchange(self, occasion: str, text: str, wait_s: float) -> dict[int, str]:
        """What each rank says on `occasion`, as far as it comes within `wait_s`; all ranks call this."""
        deadline = time.monotonic() + wait_s
        said = {self.rank: text}
        try:
            # Or a store whose host hangs would keep this call for c10d's default of minutes.
            self._store.set_timeout(timedelta(seconds=max(wait_s, 1.0)))
            self._store.set(f"{occasion}/{self.rank}", text)
            while len(said) < self.world:
                for rank in range(self.world):
                    if rank not in said and self._store.check([f"{occasion}/{rank}"]):
                        said[rank] = self._store.get(f"{occasion}/{rank}").decode()
                if len(said) == self.world or time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        except (RuntimeError, OSError):
            return {self.rank: text}
        return said

    def roll_call(self, occasion: str, wait_s: float) -> tuple[int, ...]:
        """The ranks that did not answer to `occasion` within `wait_s`; all others call it too.

        Where the store itself is gone, only its host (rank 0) is known to be missing.
        """
        said = self.exchange(f"alive/{occasion}", "1", wait_s)
        if len(said) == 1 and self.world > 2 and not self._reachable():
            return (0,)
        return tuple(rank for rank in range(self.world) if rank not in said)

    def _reachable(self) -> bool:
        try:
            return bool(self._store.check(["reachable"])) or True
        except (RuntimeError, OSError):
            return False


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store that the group's ranks share; one of this rank alone for a group that was made without."""
    try:
        store = group.get_group_store()
    except RuntimeError:
        store = None
    # Notes on it reach nobody, and nobody's reach us: failures are then known by what the transport says.
    return dist.HashStore() if store is None else store


# Weak: a board goes with its group, and must not be posted to afterwards.
_watched: weakref.WeakSet[FailureBoard] = weakref.WeakSet()
_previous: list[Callable[..., None]] = []
_children: dict[str, int] = {}  # "watched": the process whose end is watched; a forked child has another number


def _watch_child_process() -> None:
    """In a child of multiprocessing: have its end watched too, since no `excepthook` is called there."""
    if multiprocessing.parent_process() is None or _children.get("watched") == os.getpid():
        return
    _children["watched"] = os.getpid()
    # Run in the `finally` around the child's function, while its exception is on its way out. The priority is above that of
    # multiprocessing's own, which may wait for threads of queues.
    multiprocessing.util.Finalize(None, _announce_child, exitpriority=1000)


def _announce_child() -> None:
    """The child's function has ended: by an exception, or by the exit that torch's `spawn` turns one into."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    if error is not None and not isinstance(error, SystemExit):
        for board in list(_watched):
            board.post_error(error)


def _announce(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """The process is about to end with `error`: tell the other ranks, then do what was done before."""
    for board in list(_watched):
        board.post_error(error)
    (_previous[-1] if _previous else sys.__excepthook__)(kind, error, where)
