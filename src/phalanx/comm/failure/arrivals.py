"""The ranks of a world come to its store, before a group is made: who will not come any more is named.

Until a group is there no connection tells of a death, and a transport waits for an address that nobody will write, up to
the time limit. So each rank first says which process it is, and waits until all have said so.

| key | written by | read by |
| --- | --- | --- |
| `come/RANK` | every rank: which process it is | every rank |
| `met/RANK` | a rank whose group is made: it may end now, and nobody misses it here | ranks that still make theirs |
| `blame` | the first who finds a rank that will not come | the others, who would else blame the one that found it |
| `knows/RANK` | a rank that has read it | the rank that serves the store, before it ends |

Once per group, when it is made. Must not know who starts ranks: whoever does may know of ends that are not seen here.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, PeerFailure
from .answering import AnsweringStore
from .last_words import tell_at_the_end
from .processes import has_ended, identity
from .waiter import say
from .waiting import Waiting

Ends = Callable[[Collection[int]], Mapping[int, str]]
"""Given ranks: those that are known to have ended, and how, in words."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_LOOK_S = 0.5
_STAY_S = 5.0  # how long the rank that serves the store stays for those who have not read yet why it ends


def nobody_knows(ranks: Collection[int]) -> Mapping[int, str]:
    """For worlds whose ranks nobody watches."""
    return {}


class Arrivals:
    """One rank's view of who has come. `wait`, then make the group, then `met`. An `Interruption` meanwhile."""

    def __init__(
        self,
        store: dist.Store,
        place: tuple[int, Sequence[int]],
        limit_s: float,
        ends: Ends = nobody_knows,
        serves: bool = False,
    ) -> None:
        """`place`: this rank, and all ranks of the group, by their numbers in the world. `serves`: the store ends with this
        process."""
        self._rank, self._members = place
        self._limit_s = limit_s
        self._ends = ends
        self._serves = serves
        self._has_met = False
        self._process = identity()
        self._come: dict[int, dict[str, Any]] = {self._rank: self._process}
        self._store = AnsweringStore(dist.PrefixStore("phalanx/arrivals", store), is_tcp(store) and not serves, limit_s)
        self._store.set(f"come/{self._rank}", json.dumps(self._process))
        self._looked = time.monotonic()
        tell_at_the_end(self)

    def wait(self) -> None:
        """Return when every rank has come. Raises PeerFailure or CollectiveTimeout, with the ranks that have not."""
        waiting, pause_s = Waiting(say), _FIRST_PAUSE_S
        while absent := self._absent():
            error = self.error()
            if error is None and waiting.seconds > self._limit_s:
                error = CollectiveTimeout(
                    f"rank {self._rank}: rank {_listed(absent)} did not come to the meeting of the {len(self._members)} "
                    f"ranks within {self._limit_s:g} s. Start every rank, see its output if it has ended, or raise it.",
                    absent,
                )
            if error is not None:
                self.conclude()
                raise error
            waiting.look(lambda: f"rank {self._rank} waits for rank {_listed(self._absent())}, at the meeting of all ranks")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def met(self) -> None:
        """The group is made, and tells of failures by itself from now on."""
        self._has_met = True
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"met/{self._rank}", "1")

    def error(self) -> CommunicationError | None:
        """What is known of ranks that will not come; None while there is hope. Looks twice a second at most."""
        # Not at once either: a launcher starts ranks one after the other.
        if time.monotonic() - self._looked < _LOOK_S:
            return None
        self._looked = time.monotonic()
        try:
            return self._find()
        except (RuntimeError, OSError):
            return None  # a store that is gone is the error of whoever uses it

    def hear_last_words(self, words: str) -> None:
        """This process ends by an exception, before its group is made."""
        with contextlib.suppress(RuntimeError, OSError):
            if not self._has_met and not self._store.check(["blame"]):
                self._store.set("blame", json.dumps({self._rank: f"failed: {words}"}))

    def stay_for_others(self) -> None:
        """As `conclude`, for a process that ends by an exception."""
        if not self._has_met:
            self.conclude()

    def last_look(self) -> CommunicationError | None:
        """The same, when making the group has failed: a death is seen a moment after what it broke."""
        deadline = time.monotonic() + 2 * _LOOK_S
        while (error := self.error()) is None and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE_S)
        # Also one that had made the group, on its side: to connect takes both, and this rank was not done.
        ended = [rank for rank, process in self._come.items() if has_ended(process, self._process["host"])]
        if error is None and ended:
            told = f"rank {_listed(ended)} has ended while this rank was still connecting to it. See its output."
            error = PeerFailure(f"rank {self._rank}: {told}", ended)
        return error

    @property
    def store_answers(self) -> bool:
        """Whether whoever serves the store is still there."""
        try:
            return bool(self._store.check([f"come/{self._rank}"]))
        except (RuntimeError, OSError):
            return False

    def conclude(self) -> None:
        """Before this rank raises: if the store ends with it, let the others read first."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"knows/{self._rank}", "1")
            others = [rank for rank in self._come if rank != self._rank and rank not in self._lost()]
            deadline = time.monotonic() + (_STAY_S if self._serves else 0.0)
            while not self._store.check([f"knows/{rank}" for rank in others]) and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE_S)

    def _absent(self) -> list[int]:
        for rank in self._members:
            if rank not in self._come and self._store.check([f"come/{rank}"]):
                self._come[rank] = json.loads(self._store.get(f"come/{rank}"))
        return [rank for rank in self._members if rank not in self._come]

    def _find(self) -> CommunicationError | None:
        found = {**self._lost(), **self._ends(self._absent())}
        # Read after looking: whoever ends because it has found somebody has written so before.
        if not self._store.check(["blame"]):
            if not found:
                return None
            self._store.set("blame", json.dumps(found))
        blamed = {int(rank): how for rank, how in json.loads(self._store.get("blame")).items()}
        told = "; ".join(f"rank {rank} {how}" for rank, how in sorted(blamed.items()))
        return PeerFailure(
            f"rank {self._rank}: {told}, before the ranks had met. Every rank has to join the others; see its output.",
            sorted(blamed),
        )

    def _lost(self) -> dict[int, str]:
        """Ranks that came, and ended before their group was made."""
        ended = [rank for rank, process in self._come.items() if has_ended(process, self._process["host"])]
        return {rank: "has ended" for rank in ended if not self._store.check([f"met/{rank}"])}


def is_tcp(store: dist.Store) -> bool:
    """Whether a server keeps it, below whatever prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def own_connection(store: dist.Store) -> dist.Store:
    """A store that answers while the other one waits for a key, as a TCPStore does not."""
    if not is_tcp(store):
        return store  # never a second one of a file, which goes when as many as there are ranks have let go of it
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return own


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
