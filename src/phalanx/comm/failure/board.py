"""Who failed, who waits where, and what they said: notes that ranks leave for each other in the group's store.

A collective that fails tells a rank that something is wrong, rarely who. The ranks of a group therefore write to
the c10d store they already share: a rank that raises posts its message before it goes, and ranks whose collective
failed call the roll. On the healthy path nothing is written but, once, which process a rank is.

| key | written by | read by |
| --- | --- | --- |
| `failed/RANK`, `posted` | a rank whose own code raised | every rank that waits, once a second |
| `alarm/N` | a rank whose collective failed, the N-th time | the same |
| `OCCASION/N/RANK` | every rank, at the N-th exchange of that kind | every rank |
| `OCCASION/N/read/RANK` | a rank that has heard all of it | the rank that serves the store, before it goes on |
| `waits/RANK` | a rank that has waited for seconds | ranks that wait as well |
| `raised/RANK` | a rank whose forward raised, which its script may catch | ranks that wait for it for long |
| `process/RANK` | every rank, when its board is made and when it leaves | ranks that wait for it in the store |
| `knows/RANK` | a rank that has found out what is wrong | the rank that serves the store, before it ends |

Must not know of steps, buckets or parameters beyond the text it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import CommunicationError
from ..ranks import ranks_of
from .answering import AnsweringStore
from .last_words import forget_raised, remember_raised, said_by, tell_at_the_end
from .processes import has_ended, identity

_POLL_S = 0.05
# How long the rank that serves the store stays for those who have not read yet why it ends.
_STAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Where a rank waits, and how many collectives it had launched and agreements taken part in by then."""

    where: str
    launched: int
    agreed: int
    recent: list[str]
    """The last collectives that it has launched, in words."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said before it left."""

    rank: int
    when: float
    message: str


@dataclass(frozen=True, slots=True)
class Roll:
    """What came of a roll call."""

    missing: tuple[int, ...]
    places: dict[int, str]
    """Where those who answered are, in their words."""


class FailureBoard:
    """The notes of one process group. Every call is bounded in time and raises nothing of the store's.

    Made by `board_of`, one per group and process: its counters number what the ranks do together.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = ranks_of(group)
        self.me = ranks.me
        # As users know them, here and in every key and note: what is read here is what is said.
        self.rank, self.members = ranks.own, ranks.numbers
        self.world = len(self.members)
        self.timeout_s = group_timeout_s(group)
        self.launched = self.agreed = 0  # counted where ranks agree by the store (`agreement`)
        self.recent: Callable[[], list[str]] = list  # the last that were launched, in words; asked of a rank that waits
        shared = _store_of(group)
        # Notes on a store of this rank alone reach nobody, and nobody's reach us: failures are then known by what the
        # transport says, and nothing can be asked of the others here.
        self.reaches_others = shared is not None
        self._shared = dist.HashStore() if shared is None else shared
        may_hang = isinstance(self._innermost, dist.TCPStore) and not self._serves_store
        self._answering = AnsweringStore(self._shared, may_hang, self.timeout_s)
        self._store = self.store_for("failures")
        # A rank's first error is the cause; those after it are consequences, and would only cover it up.
        self._posted = False
        self._raised = ""  # what a forward has raised since this rank last went on
        self.last_words: str | None = None  # what this rank posted last, retracted or not
        # How often each kind of exchange took place. Every rank takes part in all of them, so the numbers agree, and
        # what was said at one of them is never taken for an answer at the next.
        self._times: Counter[str] = Counter()
        # Whether the transport has lost its connection to a rank, by its place in the group; where it can be asked.
        self.is_cut_off: Callable[[int], bool] = lambda place: False
        self.is_quick = False  # whether the transport itself carries failures, so that nobody need read them here
        self.knows = False
        """Whether a collective of the group has failed here, or this rank ends by an error."""
        self._gone: set[int] = set()  # ranks for which nobody need wait any more
        self._process = identity()
        if self.reaches_others and self.world > 1:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"process/{self.rank}", json.dumps(self._process))

    def store_for(self, purpose: str) -> AnsweringStore:
        """The group's store, with keys of its own for `purpose`."""
        return self._answering.prefixed(f"phalanx/{purpose}")

    # -- what a rank says of itself --------------------------------------------------------------

    def post_error(self, error: BaseException, doing: str = "") -> None:
        """Leave `error` for the others, unless it only says that another rank failed."""
        # Whoever posts an error about another rank would be taken for the rank at fault.
        if not isinstance(error, CommunicationError):
            self.post_failure(f"{type(error).__name__}{doing}: {said_by(error)}")

    def post_failure(self, message: str) -> None:
        """Leave this rank's own message for the others; later posts of the same rank are ignored."""
        note = json.dumps({"when": time.time(), "message": message[:4000]})
        # The store may have died with the rank that served it; the others will notice that themselves.
        with contextlib.suppress(RuntimeError, OSError):
            if not self._posted:
                self._posted, self.last_words = True, message
                self._store.set(f"failed/{self.rank}", note)
                # After the note: whoever sees the flag finds the note.
                self._store.set("posted", "1")

    def note_raised(self, error: BaseException, doing: str) -> None:
        """This rank raises `error`, which its script may catch: others may have to wait for it, and have not lost it."""
        self._raised = f"{type(error).__name__}{doing}: {said_by(error)}"
        remember_raised(self._raised, said_by(error))
        if not self.is_quick:  # where it is, nobody looks here
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"raised/{self.rank}", self._raised[:1000])

    def retract_failure(self) -> None:
        """This rank goes on after all: it caught what it had posted, or raised."""
        if self._raised:
            self._raised = ""
            forget_raised()
            with contextlib.suppress(RuntimeError, OSError):
                self._take_back(f"raised/{self.rank}")
        if self._posted:
            self._posted = False
            with contextlib.suppress(RuntimeError, OSError):
                self._take_back(f"failed/{self.rank}")
                if not self._written("failed"):
                    self._store.delete_key("posted")

    def note_wait(self, where: str) -> None:
        """This rank has waited for seconds: say where, for those who wait as well and wonder."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"waits/{self.rank}", json.dumps([where, self.launched, self.agreed, self.recent()]))

    def forget_wait(self) -> None:
        """The wait is over."""
        with contextlib.suppress(RuntimeError, OSError):
            self._take_back(f"waits/{self.rank}")

    def _take_back(self, key: str) -> None:
        # Not deleted: whoever has just seen that the key is there asks for its value next, and would wait for it to come
        # back until the store's time limit.
        self._store.set(key, "")

    # -- what others said ------------------------------------------------------------------------

    def failures(self) -> list[Failure]:
        """What other ranks posted, the earliest first. One question to the store where nobody has."""
        found = []
        with contextlib.suppress(RuntimeError, OSError):
            if self._store.check(["posted"]):
                for rank, text in self._written("failed").items():
                    found.append(_failure(rank, text))
        # By each rank's own clock: the order between hosts is as good as their clocks.
        return sorted(found, key=lambda failure: failure.when)

    def waits(self) -> dict[int, Wait]:
        """Where other ranks wait, as far as they have waited for long."""
        with contextlib.suppress(RuntimeError, OSError):
            waits = {rank: _wait(text) for rank, text in self._written("waits").items()}
            return {rank: wait for rank, wait in waits.items() if wait is not None}
        return {}

    def raised_before(self, ranks: Collection[int]) -> str:
        """What those of `ranks` raised that have not gone on since, in sentences; empty if that explains nothing."""
        with contextlib.suppress(RuntimeError, OSError):
            said = {rank: " ".join(text.split()) for rank, text in self._written("raised").items() if rank in ranks}
            return "".join(f" Before, rank {rank} had raised {text}" for rank, text in said.items())
        return ""

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Those of `ranks` that are known to have left the group, or to have ended."""
        with contextlib.suppress(RuntimeError, OSError):
            return [rank for rank in ranks if self._has_ended(rank)]
        return []

    def _has_ended(self, rank: int) -> bool:
        # Read each time: a rank that leaves says so in the same place.
        if self._store.check([f"process/{rank}"]):
            process = _process(self._store.get(f"process/{rank}").decode(errors="replace"))
            if process.get("left") or (process and has_ended(process, self._process["host"])):
                return True
            if process.get("host") == self._process["host"]:
                return False
        # Of another host, or ended before it had a board: a script made the group by itself.
        return self.is_cut_off(self.members.index(rank))

    def _written(self, kind: str) -> dict[int, str]:
        others = [rank for rank in self.members if rank != self.rank]
        there = [rank for rank in others if self._store.check([f"{kind}/{rank}"])]
        texts = {rank: self._store.get(f"{kind}/{rank}").decode(errors="replace") for rank in there}
        return {rank: text for rank, text in texts.items() if text}

    # -- what ranks find out together ------------------------------------------------------------

    def raise_alarm(self) -> None:
        """Make every rank that waits for a collective look up and answer the roll."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"alarm/{self._times['alive']}", str(self.rank))

    def is_alarmed(self) -> bool:
        """Whether some rank's collective failed, or a rank said that it did."""
        try:
            # The alarm of a roll that has been called is over, and has another number.
            return self._store.check([f"alarm/{self._times['alive']}"]) or bool(self.failures())
        except (RuntimeError, OSError):
            return True  # the store is gone, and its host with it

    def interruption(self) -> CommunicationError | None:
        """What somebody outside of the group says of it, where its store can be interrupted (`interruption`)."""
        try:
            self._store.check(["reachable"])
        except CommunicationError as error:
            return error
        except (RuntimeError, OSError):
            pass
        return None

    def exchange(self, occasion: str, text: str, wait_s: float) -> dict[int, str]:
        """What each rank says on `occasion`, as far as it comes within `wait_s`; all ranks call this equally often."""
        deadline = time.monotonic() + wait_s
        key = f"{occasion}/{self._times[occasion]}"
        self._times[occasion] += 1
        said = {self.rank: text}
        try:
            with self._limited(wait_s):
                self._store.set(f"{key}/{self.rank}", text)
                while len(said) < self.world:
                    for rank in self.members:
                        if rank not in said and self._store.check([f"{key}/{rank}"]):
                            said[rank] = self._store.get(f"{key}/{rank}").decode()
                    if len(said) == self.world or time.monotonic() > deadline:
                        break
                    time.sleep(_POLL_S)
                if len(said) == self.world:
                    self._let_read(key, deadline)
        except (RuntimeError, OSError):
            return said if len(said) == self.world else {self.rank: text}
        return said

    def _let_read(self, key: str, deadline: float) -> None:
        """Whoever serves the store may end by what was said, and the store with it: it stays until all have heard that."""
        if not self._serves_store:
            self._store.set(f"{key}/read/{self.rank}", "1")
            return
        read = [f"{key}/read/{rank}" for rank in self.members if rank != self.rank]
        while not self._store.check(read) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def roll_call(self, where: str, wait_s: float) -> Roll:
        """Who answers within `wait_s`, and where each of them is; all others call it too.

        Where the store itself is gone, only its host (rank 0) is known to be missing.
        """
        said = self.exchange("alive", where, wait_s)
        if len(said) == 1 and self.world > 2 and not self.is_reachable():
            return Roll((0,), said)
        return Roll(tuple(rank for rank in self.members if rank not in said), said)

    def is_reachable(self) -> bool:
        """Whether the store answers."""
        try:
            self._store.check(["reachable"])  # whatever it says
            return True
        except (RuntimeError, OSError):
            return False

    @contextlib.contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """A store whose host hangs would keep a call for c10d's default of minutes. The limit is the shared store's."""
        before: timedelta = self._shared.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        self._shared.set_timeout(timedelta(seconds=max(seconds, 1.0)))
        try:
            yield
        finally:
            self._shared.set_timeout(before)

    # -- the end ---------------------------------------------------------------------------------

    def conclude(self, gone: Collection[int] = ()) -> None:
        """This rank knows what is wrong, and needs the store no more; `gone`: ranks that nobody will hear of."""
        self.give_up_on(gone)
        if not self.knows:
            self.knows = True
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"knows/{self.rank}", "1")

    def leave(self) -> None:
        """This rank leaves the group and may live on: whoever waits for it in the store is not told by a connection."""
        # A store of rank 0's may have ended before; to ask it is a word of c10d's on stderr for nothing.
        may_be_gone = isinstance(self._innermost, dist.TCPStore) and self.rank and not launcher_serves_store()
        if self.reaches_others and self.world > 1 and not may_be_gone:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"process/{self.rank}", json.dumps({**self._process, "left": True}))

    def give_up_on(self, ranks: Collection[int]) -> None:
        """Nobody will hear of these ranks any more, nor they of anything."""
        self._gone.update(ranks)

    def hear_last_words(self, words: str) -> None:
        """This process ends by an exception: leave its words for the others."""
        self.post_failure(words)
        self.leave()  # it may stay for those who read, and is not waited for meanwhile

    def stay_for_others(self) -> None:
        """Before a process ends by an exception: if it takes the store with it, let the others read first."""
        self.conclude()
        others = [rank for rank in self.members if rank != self.rank and rank not in self._gone]
        if others and not self.is_quick and self._serves_store:
            deadline = time.monotonic() + _STAY_S
            with contextlib.suppress(RuntimeError, OSError):
                while not self._store.check([f"knows/{rank}" for rank in others]) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)

    @property
    def _serves_store(self) -> bool:
        """Whether the store is a server in this process. A wrong guess costs a few seconds at the end."""
        is_tcp = isinstance(self._innermost, dist.TCPStore)
        return is_tcp and dist.is_initialized() and dist.get_rank() == 0 and not launcher_serves_store()

    @property
    def _innermost(self) -> dist.Store:
        store = self._shared
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store


def _failure(rank: int, text: str) -> Failure:
    """A note as posted by `post_failure`. One that is no such note tells all the same that the rank has failed."""
    try:
        note = json.loads(text)
        return Failure(rank, float(note["when"]), str(note["message"]))
    except (ValueError, TypeError, LookupError, RecursionError):
        return Failure(rank, 0.0, f"(a note that cannot be read: {text:.200})")


def _wait(text: str) -> Wait | None:
    """A note as left by `note_wait`; None if it is no such note, of which nothing follows."""
    try:
        where, launched, agreed, recent = json.loads(text)
        return Wait(str(where), int(launched), int(agreed), [str(one) for one in recent])
    except (ValueError, TypeError, RecursionError):
        return None


def _process(text: str) -> dict[str, Any]:
    """A note of which process a rank is (`identity`); empty if it is no such note."""
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) and {"host", "pid", "began"} <= note.keys() else {}


def launcher_serves_store() -> bool:
    """Whether the store is in the process of a launcher, which lives on. Otherwise rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The group's own time limit for silence."""
    # No public call returns it; the options of the group's backend do, where it has any.
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return float(options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds()) if hasattr(dist, "default_pg_timeout") else 1800.0


def _store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the group's ranks share; None of a group that was made without."""
    try:
        return group.get_group_store()
    except RuntimeError:
        return None


# Weak: a board goes with its group, and must not be posted to afterwards.
_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, FailureBoard] = weakref.WeakKeyDictionary()


def board_of(group: dist.ProcessGroup) -> FailureBoard:
    """The board of `group` in this process."""
    board = _boards.get(group)
    if board is None:
        board = _boards[group] = FailureBoard(group)
        tell_at_the_end(board)
        tell_at_the_end(_unused)
    return board


class _UnusedGroups:
    """Groups that this process has made and not used yet: it has no board there, and others may already wait in them."""

    def hear_last_words(self, words: str) -> None:
        # Not public, but the only list of the groups that a script has made by torch's own call.
        groups = list(dist.distributed_c10d._world.pg_map)
        # A store that does not answer would be waited for once per group. Nobody asks those of groups that were destroyed.
        if all(_boards[group].is_reachable() for group in groups if group in _boards):
            for group in groups:
                if group not in _boards:
                    FailureBoard(group).post_failure(words)

    def stay_for_others(self) -> None:
        """Whoever reads it ends by an error, and says on its other boards that it knows."""


_unused = _UnusedGroups()
