"""What ranks tell each other around a save or a load: short texts, in the store that their group has anyway.

No collective, so that a rank that stays away is named after a time limit of our own, and nothing is left half done on the
group. Without a group there is one rank, which agrees with itself.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..comm.failure.answering import AnsweringStore, SilentStoreError
from ..comm.failure.board import FailureBoard, board_of
from ..comm.failure.waiter import Waiter
from ..comm.ranks import Ranks, ranks_of
from ..errors import MismatchError, PeerFailure, PhalanxError

# How many Checkpointers this process has made on each group; ranks make them in the same order. By the group itself, not its
# name: a process that leaves a world and joins another starts to count anew, as the others there do.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 1e-2
_LOOK_S = 1.0
_NOTHING = "Nothing was written or changed."


class Agreement:
    """The ranks of `group`, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.ranks = Ranks((0,), 0, "rank 0") if group is None else ranks_of(group)
        """How messages name them."""
        self._timeout = timedelta(seconds=timeout_s)
        self._round = 0
        self._of = None if group is None else weakref.ref(group)
        self._store: AnsweringStore | None = None
        self._board: FailureBoard | None = None
        if group is not None and self.world > 1:
            number = _made[group] = _made.get(group, 0) + 1
            self._board = board_of(group)  # now, so that the others know which process this rank is
            self._store = self._board.store_for(f"checkpoint/{number}")

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether these are the ranks of `group`."""
        return group is (None if self._of is None else self._of())

    def exchange(
        self, value: dict[str, Any], doing: str, unless: str = _NOTHING, work_s: float = 0.0
    ) -> list[dict[str, Any]]:
        """What every rank says, by rank. Raises MismatchError on the ranks that came if some did not, PeerFailure if these
        have ended.

        `doing` is what all ranks should be doing now; a rank that does something else is an error on every rank. `unless`
        says what has become of files and training if the ranks do not come together. `work_s` is how much longer than this
        rank another may work before it comes here.
        """
        if self._store is None:
            return [value]
        timeout_s = (self._timeout + timedelta(seconds=work_s)).total_seconds()
        keys = [f"{self._round}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], json.dumps({"doing": doing, **value}))
            missing = self._await(keys, timeout_s, doing)
            said = [] if missing else [json.loads(text) for text in self._store.multi_get(keys)]
        except PhalanxError:
            raise
        except (RuntimeError, OSError) as error:
            # The store is gone, or silent, and whoever serves it with it.
            assert self._board is not None, "there are others"
            raise Waiter(self._board).explain(error, doing, isinstance(error, SilentStoreError)) from error
        if missing:
            raise MismatchError(
                f"{self.ranks.me}: {doing} was not called by ranks {missing} within {timeout_s:.0f} s. "
                f"Every rank has to call it, in the same order. {unless}"
            )
        # Everybody has read the round before the last: nobody begins a round before having read the one before it.
        if self._round > 1:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._round - 2}/{self.rank}")
        self._round += 1
        by_rank = zip(self.ranks.numbers, said, strict=True)
        others = {rank: one["doing"] for rank, one in by_rank if one["doing"] != doing}
        if others:
            raise MismatchError(
                f"{self.ranks.me} called {doing}, but "
                + ", ".join(f"rank {rank} {other}" for rank, other in others.items())
                + f". Every rank has to call the same. {unless}"
            )
        return said

    def _await(self, keys: list[str], limit_s: float, doing: str) -> list[int]:
        """The ranks that have not come within `limit_s`. Raises PeerFailure as soon as one of them has ended."""
        assert self._store is not None, "there are others"
        started = looked = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        # Asked again and again rather than waited for: nothing is under way between the ranks, which would tell of a death.
        while not self._store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._look_for_ended(keys, doing)
            if now - started > limit_s and (missing := self._give_up(keys)):
                return missing
        return []

    def _look_for_ended(self, keys: list[str], doing: str) -> None:
        absent = self._absent(keys)
        assert self._board is not None, "there are others"
        for failure in self._board.failures():
            if failure.rank in absent:
                words = f"rank {failure.rank} failed first: {failure.message}"
                raise PeerFailure(f"{self.ranks.me}: {doing}: {words}", [failure.rank])
        # Asked again: it may have come, and ended after that.
        ended = [rank for rank in self._board.ended(absent) if rank in self._absent(keys)]
        if ended:
            who = ", ".join(map(str, ended))
            raise PeerFailure(f"{self.ranks.me}: {doing}: rank {who} has ended, and did not come. Look at its log.", ended)

    def _give_up(self, keys: list[str]) -> list[int]:
        """Take back what this rank said; whom it has waited for in vain."""
        assert self._store is not None, "there are others"
        absent = self._absent(keys)
        # Whoever came at the last moment goes on, since our word is there: then so does this rank.
        if absent:
            self._store.set(f"{keys[self.rank]}/gave up", "1")
            # Taken back: whoever comes later must not take this for an answer. The next round has the same number.
            self._store.delete_key(keys[self.rank])
        by_rank = dict(zip(self.ranks.numbers, keys, strict=True))
        # Ranks give up one after the other: those before this one had come.
        return [rank for rank in absent if not self._store.check([f"{by_rank[rank]}/gave up"])] or absent

    def _absent(self, keys: list[str]) -> list[int]:
        assert self._store is not None, "there are others"
        return [rank for rank, key in zip(self.ranks.numbers, keys, strict=True) if not self._store.check([key])]

    def post_failure(self, save: str, text: str) -> None:
        """Tell the other ranks that this one's part of a save failed, in case their writers cannot see it."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set(f"failed/{save}", f"{self.ranks.me}: {text}")

    def failure(self, save: str) -> str | None:
        """What some rank posted about a save, if any."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([f"failed/{save}"]):
                return self._store.get(f"failed/{save}").decode()
        return None
