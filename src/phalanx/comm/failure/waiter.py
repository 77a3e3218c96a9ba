"""Waiting for a collective without waiting for ever or in silence, and saying afterwards whose fault it was.

Some transports tell only the neighbours of a dead rank, and only that a socket closed. A wait here
looks at the failure board once a second, so that one rank's failure reaches all, and turns whatever the
transport said into an error that names the rank. Must not know of parameters.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ...errors import CollectiveTimeout, CommunicationError, MismatchError, PeerFailure, PhalanxError
from ..work import Work
from .board import FailureBoard
from .waiting import Waiting

# A c10d work cannot be woken up while somebody waits for it, so waiting is done in slices of this length.
_SLICE = timedelta(seconds=1)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 0.1  # between two questions to a device
_ROLL_CALL_S = 2.0  # longer than a slice: whoever waits must have looked at the board by then
_NOTE_S = 3.0  # a rank that has waited for so long says where, for those who look for the cause


def say(line: str) -> None:
    """One line for the user, on stderr."""
    sys.stderr.write(f"phalanx: {line}\n")
    sys.stderr.flush()


class LongWait:
    """One wait of one rank: after some seconds it is noted for the others, after ten it is said aloud, then rarely.

    A context around the wait. A note that outlived it would let others think that this rank has passed by their agreement.
    """

    __slots__ = ("_board", "_waiting", "_where", "is_noted")

    def __init__(self, board: FailureBoard, where: str) -> None:
        self._board = board
        self._where = where
        self._waiting: Waiting | None = None  # most waits are over before anybody looks
        self.is_noted = False

    def __enter__(self) -> LongWait:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_noted:
            self._board.forget_wait()

    @property
    def seconds(self) -> float:
        """How long the wait has lasted since somebody first asked."""
        self._waiting = self._waiting or Waiting(say)
        return self._waiting.seconds

    def look(self) -> None:
        """Called about once a second while waiting."""
        self._waiting = self._waiting or Waiting(say)
        if self._waiting.seconds >= _NOTE_S and not self.is_noted:
            self.is_noted = True
            self._board.note_wait(self._where)
        self._waiting.look(self._words)

    def _words(self) -> str:
        others = self._board.waits()
        absent = [rank for rank in self._board.members if rank != self._board.rank and rank not in others]
        apart = {rank: wait.where for rank, wait in others.items() if wait.where != self._where}
        elsewhere = "; ".join(f"rank {rank} waits at {where}" for rank, where in apart.items())
        # Those who wait as well have said so by now: the others do something else, or are no more.
        who = f"for rank {_listed(absent)}" if absent else "and so do all others"
        line = f"{self._board.me} waits {who}, at {self._where}{f' ({elsewhere})' if elsewhere else ''}"
        before = self._board.raised_before(absent)
        return f"{line}.{before}" if before else line


class Waiter:
    """Waits on behalf of one group; `where` in each call says in words what is being waited for, and begins messages."""

    def __init__(self, board: FailureBoard) -> None:
        self._board = board

    @property
    def board(self) -> FailureBoard:
        """Where ranks of the group leave their errors for the others."""
        return self._board

    def wait(self, work: Work, where: str) -> None:
        """Return when the work is done. Raises CommunicationError naming the rank at fault."""
        with LongWait(self.board, where) as wait:
            while True:
                try:
                    work.wait(_SLICE)
                    return
                except RuntimeError as error:
                    # The end of a slice looks like any other error; only the work itself knows which it was.
                    silent = wait.seconds > self.board.timeout_s
                    if work.is_completed():
                        raise self.explain(error, where, silent or _is_timeout(error)) from error
                    if silent or self.board.is_alarmed():
                        raise self.explain(error, where, silent) from error
                    wait.look()
                    self._compare_launches(wait, where)

    def _compare_launches(self, mine: LongWait, where: str) -> None:
        """Ranks that wait for other collectives than each other, each of which is known to all, would do so for ever."""
        if not mine.is_noted:
            return
        launched = numbered(self.board.launched, self.board.recent())
        for rank, wait in self.board.waits().items():
            theirs = numbered(wait.launched, wait.recent)
            number = min((each for each in launched.keys() & theirs.keys() if launched[each] != theirs[each]), default=None)
            if number is not None:
                error = MismatchError(
                    f"{self.board.me}: {where}: the ranks have come to different collectives: number {number} of this group "
                    f"is {launched[number]} here, and {theirs[number]} on rank {rank}, which waits at {wait.where}. Do the "
                    "same, in the same order and equally often, on every rank."
                )
                self.board.post_error(error)
                raise error

    def wait_until(self, is_done: Callable[[], bool], where: str) -> None:
        """Return when `is_done` says so, as of an event on a device: no communicator is aborted by waiting for that."""
        pause_s = _SHORTEST_PAUSE_S
        with LongWait(self.board, where) as wait:
            while not is_done():
                silent = wait.seconds > self.board.timeout_s
                if silent or (pause_s >= _LONGEST_PAUSE_S and self.board.is_alarmed()):
                    raise self.explain(TimeoutError("the device did not come to it"), where, silent)
                wait.look()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def wait_future(self, future: torch.futures.Future[Any], where: str) -> Any:
        """The future's value; its failure is explained as a collective's is."""
        # Not `future.wait`, which has no time limit: a hook's future may depend on a rank that died.
        finished = threading.Event()
        future.add_done_callback(lambda _: finished.set())
        with LongWait(self.board, where) as wait:
            while not finished.wait(_SLICE.total_seconds()):
                silent = wait.seconds > self.board.timeout_s
                if silent or self.board.is_alarmed():
                    raise self.explain(TimeoutError("the future never completed"), where, silent)
                wait.look()
        try:
            # Done, so it does not block; but unlike `value` it orders the current stream after what the future stands for.
            return future.wait()
        except CommunicationError as error:
            raise self._placed(error, where) from error
        except RuntimeError as error:
            if (named := _named_in(str(error))) is not None:
                if isinstance(named, MismatchError):
                    raise self.mismatch(named, where) from error
                assert isinstance(named, CommunicationError), "there are no other kinds in the table"
                self.board.give_up_on(named.ranks)
                raise self._placed(named, where) from error
            raise self.explain_transport(error, where) from error

    def _placed(self, error: CommunicationError, where: str) -> CommunicationError:
        """The error with where it reached this rank. What another rank has told says nothing of this one."""
        me = "" if str(error).startswith(f"rank {self.board.rank}:") else f"{self.board.me}: "
        return type(error)(f"{me}{where}: {error}", error.ranks)

    def mismatch(self, error: MismatchError, where: str) -> MismatchError:
        """The ranks came to different collectives: every rank is told what each was at."""
        said = self.board.exchange("mismatch", where, _ROLL_CALL_S)
        # Where all say the same, the collective itself says what differs.
        table = f" At that moment {at_work(said)}." if len(set(said.values())) > 1 else ""
        return MismatchError(f"{where}: {error}{table}")

    def explain(self, error: BaseException, where: str, timed_out: bool) -> CommunicationError:
        """The error to raise in place of the transport's own, after asking who is still there."""
        explained = self._explain(error, where, timed_out)
        self.board.conclude(explained.ranks)
        return explained

    def explain_transport(self, error: RuntimeError, where: str) -> RuntimeError:
        """The same for what a rank or a connection did; a mistake of a hook, or of who else was called, stays what it is."""
        failed = self.board.failures() or _is_transport(error)
        return self.explain(error, where, _is_timeout(error)) if failed else error

    def _explain(self, error: BaseException, where: str, timed_out: bool) -> CommunicationError:
        me = f"{self.board.me}: {where}"
        # First of all: ranks that wait for another collective look up and answer the roll only if alarmed.
        self.board.raise_alarm()
        posted = self.board.failures()
        # Whoever posted its error first is at fault; the roll is called only if nobody did.
        roll = None if posted else self.board.roll_call(where, _ROLL_CALL_S)
        # Again: a rank may have posted while the roll was called.
        posted = posted or self.board.failures()
        if posted:
            first = posted[0]
            return PeerFailure(f"{me}: rank {first.rank} failed first: {first.message}", [first.rank])
        if (told := self.board.interruption()) is not None:
            return type(told)(f"{me}: {told}", told.ranks)
        words = " ".join(str(error).split())
        if roll is None or not roll.missing:
            places = {} if roll is None else roll.places
            if len(set(places.values())) > 1:
                return CommunicationError(
                    f"{me}: the ranks wait for each other at different points: {at_work(places)}. Do the same, in the same "
                    f"order and equally often, on every rank. ({words})"
                )
            return CommunicationError(f"{me}: the collective failed though every rank answers: {words}")
        missing = roll.missing
        who = _listed(missing)
        before = self.board.raised_before(missing)
        if timed_out:
            return CollectiveTimeout(
                f"{me}: no answer from rank {who} within the group's time limit of {self.board.timeout_s:.0f} s. "
                f"Look at what that rank was doing, or give the group a longer timeout. ({words}){before}",
                missing,
            )
        return PeerFailure(f"{me}: rank {who} died, left the group or hangs. Look at its log. ({words}){before}", missing)


def numbered(launched: int, recent: Sequence[str]) -> dict[int, str]:
    """The last of `launched` collectives, by their number: counted from 0, on every rank alike."""
    return dict(enumerate(recent, start=launched - len(recent)))


_NAMED: dict[str, type[PhalanxError]] = {
    kind.__name__: kind for kind in (CommunicationError, PeerFailure, CollectiveTimeout, MismatchError)
}


def quotable(error: CommunicationError) -> CommunicationError:
    """A copy that says its ranks in words, for a future's callback to raise: C++ keeps of it only what it said."""
    return type(error)(f"{error}{_AT_FAULT}{_listed(error.ranks)}]" if error.ranks else str(error), error.ranks)


def _named_in(text: str) -> PhalanxError | None:
    """The error of ours that a future's text quotes, with its ranks if it was made quotable."""
    found = re.search(rf"\b({'|'.join(_NAMED)}): (.*?)(?:\n\nAt:\n|\Z)", text, re.DOTALL)
    if found is None:
        return None
    kind, (words, _, ranks) = _NAMED[found[1]], found[2].strip().partition(_AT_FAULT)
    if issubclass(kind, CommunicationError):
        return kind(words, [int(rank) for rank in re.findall(r"\d+", ranks.partition("]")[0])])
    return kind(words)


_AT_FAULT = " [at fault: rank "


def at_work(said: Mapping[int, str]) -> str:
    """What each rank was at, in words."""
    return "; ".join(f"rank {rank} was at {words}" for rank, words in sorted(said.items()))


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


def _is_timeout(error: BaseException) -> bool:
    """Whether a transport says that it gave up waiting."""
    return "imed out" in str(error) or "timeout" in str(error).lower()


def _is_transport(error: RuntimeError) -> bool:
    """Whether a future failed because a connection or a time limit did, not because a hook raised."""
    return any(word in str(error) for word in ("Connection", "Read error", "imed out", "Broken pipe", "socket"))
