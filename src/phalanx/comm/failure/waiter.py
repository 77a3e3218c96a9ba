"""Waiting for a collective without waiting for ever, and saying afterwards whose fault it was.

Some transports tell only the neighbours of a dead rank, and only that a socket closed. A wait here
looks at the failure board once a second, so that one rank's failure reaches all, and turns whatever the
transport said into an error that names the rank. Must not know of parameters.
"""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, PeerFailure
from ..work import Work
from .board import FailureBoard

# A c10d work cannot be woken up while somebody waits for it, so waiting is done in slices of this length.
_SLICE = timedelta(seconds=1)
_ROLL_CALL_S = 2.0  # longer than a slice: whoever waits must have looked at the board by then


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The group's own time limit for silence."""
    # No public call returns it; the options of the group's backend do, where it has any.
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return float(options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds()) if hasattr(dist, "default_pg_timeout") else 1800.0


class Waiter:
    """Waits on behalf of one group; `where` in each call says in words what is being waited for."""

    def __init__(self, group: dist.ProcessGroup, board: FailureBoard, names_failures: bool) -> None:
        self.board = board
        self._names_failures = names_failures
        self._timeout_s = group_timeout_s(group)

    def wait(self, work: Work, where: str) -> None:
        """Return when the work is done. Raises CommunicationError naming the rank at fault."""
        if self._names_failures:
            # The transport wakes up by itself and knows the rank; only where it happened is missing.
            try:
                work.wait()
            except CommunicationError as error:
                raise self._with_last_words(error, where) from error
            return
        started = time.monotonic()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                # The end of a slice looks like any other error; only the work itself knows which it was.
                silent = time.monotonic() - started > self._timeout_s
                if work.is_completed():
                    raise self.explain(error, where, silent or _is_timeout(error)) from error
                if silent or self.board.is_alarmed():
                    raise self.explain(error, where, silent) from error

    def wait_future(self, future: torch.futures.Future[Any], where: str) -> Any:
        """The future's value; its failure is explained as a collective's is."""
        # Not `future.wait`, which has no time limit: a hook's future may depend on a rank that died.
        finished = threading.Event()
        future.add_done_callback(lambda _: finished.set())
        started = time.monotonic()
        while not finished.wait(_SLICE.total_seconds()):
            silent = time.monotonic() - started > self._timeout_s
            if silent or self.board.is_alarmed():
                raise self.explain(TimeoutError("the future never completed"), where, silent)
        try:
            return future.value()
        except CommunicationError as error:
            raise self._with_last_words(error, where) from error
        except RuntimeError as error:
            if (named := _named_in(str(error))) is not None:
                kind, words = named
                raise self._with_last_words(kind(words), where) from error
            # A hook's own mistake stays what it is; only what a rank or a connection did is explained.
            failed = self.board.failures() or _is_transport(error)
            raise (self.explain(error, where, _is_timeout(error)) if failed else error) from error

    def _with_last_words(self, error: CommunicationError, where: str) -> CommunicationError:
        """The transport's error, and beside it what the rank at fault said before it went."""
        posted = [each for each in self.board.failures() if not error.ranks or each.rank in error.ranks]
        said = f" (rank {posted[0].rank} failed first: {posted[0].message})" if posted else ""
        return type(error)(f"{where}: {error}{said}", error.ranks)

    def explain(self, error: BaseException, where: str, timed_out: bool) -> CommunicationError:
        """The error to raise in place of the transport's own, after asking who is still there."""
        me = f"rank {self.board.rank}: {where}"
        # First of all: ranks that wait for another collective look up and answer the roll only if alarmed.
        self.board.raise_alarm()
        posted = self.board.failures()
        # Whoever posted its error first is at fault; the roll is called only if nobody did.
        missing = () if posted else self.board.roll_call("failure", _ROLL_CALL_S)
        # Again: a rank may have posted while the roll was called.
        posted = posted or self.board.failures()
        if posted:
            first = posted[0]
            return PeerFailure(f"{me}: rank {first.rank} failed first: {first.message}", [first.rank])
        words = " ".join(str(error).split())
        if not missing:
            # An alarm left standing would end healthy waits of whoever goes on with this group.
            self.board.calm()
            return CommunicationError(f"{me}: the collective failed though every rank answers: {words}")
        who = ", ".join(map(str, missing))
        if timed_out:
            return CollectiveTimeout(
                f"{me}: no answer from rank {who} within the group's time limit of {self._timeout_s:.0f} s. "
                f"Look at what that rank was doing, or give the group a longer timeout. ({words})",
                missing,
            )
        return PeerFailure(f"{me}: rank {who} died, left the group or hangs. Look at its log. ({words})", missing)


_NAMED = {kind.__name__: kind for kind in (CommunicationError, PeerFailure, CollectiveTimeout)}


def _named_in(text: str) -> tuple[type[CommunicationError], str] | None:
    """The error of ours that a future's text quotes: C++ keeps of a callback's exception only what it said."""
    found = re.search(rf"\b({'|'.join(_NAMED)}): (.*?)(?:\n\nAt:\n|\Z)", text, re.DOTALL)
    return None if found is None else (_NAMED[found[1]], found[2].strip())


def _is_timeout(error: BaseException) -> bool:
    """Whether a transport says that it gave up waiting."""
    return "imed out" in str(error) or "timeout" in str(error).lower()


def _is_transport(error: RuntimeError) -> bool:
    """Whether a future failed because a connection or a time limit did, not because a hook raised."""
    return any(word in str(error) for word in ("Connection", "Read error", "imed out", "Broken pipe", "socket"))
