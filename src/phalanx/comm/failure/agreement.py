"""Whether all ranks mean the same: settings compared before anything is done by them.

    settings   a name and a value each, in words; equal on all ranks or an error on all ranks
    launched   how many collectives this rank has started on the group
    agreed     how many agreements this rank has taken part in

Two ways. Where a transport compares the arguments of every collective (shared memory), an agreement is a collective like
any other. Elsewhere (gloo, nccl) it goes through the group's store, because such a transport must not be given calls that
do not fit together: gloo ends the process when a message is longer than what is expected. For the same reason a collective
is agreed upon before it starts if one of its kind and size has not followed the one before it yet; training repeats
itself, so that later ones cost a look into a set. A rank that comes to known collectives in another order comes to a pair
that nobody has agreed upon, asks, and has sent nothing.

A rank that changed something alone asks for an agreement to which nobody comes. It is found out by the counts: who has
launched more than this rank had when it asked, without having agreed as often, has passed by. Ranks that come to other
collectives of which each is known wait for each other; what each has launched last is compared then (`waiter`).
Must not know what settings mean.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ...errors import CommunicationError, MismatchError, PhalanxError
from .answering import SilentStoreError
from .board import FailureBoard
from .waiter import LongWait

Settings = Mapping[str, str]
# Given what was waited for, and whether the time limit has passed: the error to raise.
Fail = Callable[[str, bool], CommunicationError]

MOST_RECENT = 64
"""How many of its last collectives a rank that waits tells the others."""
_MOST_PAIRS = 1024  # of collectives in a row; a program that has more does not repeat itself, and is not held up each time
Kind = tuple[str, int, torch.dtype | None, int]
"""Of a collective: the verb, how many elements of which dtype (0 and None: any), and the root or -1."""

_FIRST_POLL_S = 0.0002
_LONGEST_POLL_S = 0.02
_LOOK_S = 1.0


def encode(occasion: str, settings: Settings) -> bytes:
    """What is compared, in a form that is equal exactly if the settings are."""
    return json.dumps([occasion, dict(settings)], sort_keys=True).encode()


def fingerprint(text: bytes) -> bytes:
    """32 bytes that stand for the text."""
    return hashlib.sha256(text).digest()


def differences(texts: Sequence[bytes], ranks: Sequence[int]) -> str:
    """What differs, and which of `ranks` have what; `texts` as made by `encode`, one per rank."""
    occasions, settings = zip(*(json.loads(text) for text in texts), strict=True)
    if len(set(occasions)) > 1:
        # What is known by one name is shown by its value: the next collective says little, a barrier more.
        single = [f" ({' '.join(said.values())})" if len(said) == 1 else "" for said in settings]
        points = [occasion + value for occasion, value in zip(occasions, single, strict=True)]
        return f"the ranks are not at the same point: {_by_value(points, ranks)}"
    names = sorted({name for said in settings for name in said}, key=lambda name: (len(name), name))
    # What a rank does not have at all may follow from something else that differs, which comes first.
    names.sort(key=lambda name: any(name not in said for said in settings))
    differing = [name for name in names if len({said.get(name) for said in settings}) > 1]
    told = [f"{name} is {_by_value([said.get(name, 'missing') for said in settings], ranks)}" for name in differing[:5]]
    more = f" (and {len(differing) - 5} more)" if len(differing) > 5 else ""
    return f"the ranks differ in {occasions[0]}: {'; '.join(told)}{more}"


def _by_value(values: Sequence[str], ranks: Sequence[int]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on rank {', '.join(map(str, holding))}" for value, holding in holders.items())


def agreeing_on(occasion: str, changed: str) -> str:
    """Where a rank waits that agrees on something, in words."""
    return f"agreeing on {occasion}{f' ({changed})' if changed else ''}"


def disagreement(me: str, texts: Sequence[bytes], ranks: Sequence[int]) -> MismatchError:
    """The error for settings that differ; the same on every rank but for its beginning."""
    remedy = "Give every rank the same arguments, and do things in the same order on every rank."
    return MismatchError(f"{me}: {differences(texts, ranks)}. {remedy}")


def _in_words(kind: Kind, ranks: Sequence[int]) -> str:
    verb, numel, dtype, root = kind
    if dtype is None:
        return verb if not numel else f"{verb} ({numel})"
    return f"{verb} of {numel} x {str(dtype).removeprefix('torch.')}{'' if root < 0 else f' from rank {ranks[root]}'}"


class StoreAgreement:
    """The agreements of one group whose transport compares nothing by itself. One per group and process."""

    def __init__(self, board: FailureBoard) -> None:
        self._of = weakref.ref(board)  # which keeps this alive
        self._store = board.store_for("agreements")
        self._pairs: set[tuple[Kind | None, Kind]] = set()
        self._last: Kind | None = None
        self._recent: deque[Kind] = deque(maxlen=MOST_RECENT)
        # Not of `self`, which the board would keep: it is kept by the board.
        recent, members = self._recent, board.members
        board.recent = lambda: [_in_words(kind, members) for kind in recent]

    @property
    def _board(self) -> FailureBoard:
        board = self._of()
        assert board is not None, "a group is used while it lives"
        return board

    def launches(self, verb: str, tensor: torch.Tensor, root: int, fail: Fail) -> None:
        """A collective is about to start; compared with the others' if its kind has not followed the last one's."""
        self.comes_to((verb, tensor.numel(), tensor.dtype, root), fail)

    def comes_to(self, kind: Kind, fail: Fail) -> None:
        """The same, of what has no tensor."""
        pair = (self._last, kind)
        if pair not in self._pairs and len(self._pairs) < _MOST_PAIRS:
            now = _in_words(kind, self._board.members)
            after = "" if self._last is None else f", after {_in_words(self._last, self._board.members)}"
            self.agree("the next collective", {"what to start": now}, fail, f"what to start is {now}{after}")
            self._pairs.add(pair)
        self._last = kind
        self._recent.append(kind)
        # Not before: whoever passes by an agreement is found out by having launched more.
        self._board.launched += 1

    def agree(self, occasion: str, settings: Settings, fail: Fail, changed: str = "") -> None:
        """Raise MismatchError on every rank unless all ranks say the same. `fail` explains why nobody comes."""
        number, self._board.agreed = self._board.agreed, self._board.agreed + 1
        text, where = encode(occasion, settings), agreeing_on(occasion, changed)
        try:
            # Everybody has read the last but one: all have been at the last one, which this rank has seen.
            read = f"{number - 2}/{self._board.rank}" if number >= 2 else None
            said = self._exchange(f"{number}", fingerprint(text).hex().encode(), where, fail, read)
            texts = self._exchange(f"{number}/text", text, where, fail) if len(set(said)) > 1 else []
        except PhalanxError:
            raise
        except (RuntimeError, OSError) as error:
            # The store is gone, or silent, and whoever serves it with it.
            raise fail(where, isinstance(error, SilentStoreError)) from error
        if texts:
            raise disagreement(self._board.me, texts, self._board.members)

    def _exchange(self, key: str, mine: bytes, where: str, fail: Fail, read: str | None = None) -> list[bytes]:
        """What each rank says at `key`; `read` is a key of this rank's that nobody needs any more."""
        keys = [f"{key}/{rank}" for rank in self._board.members]

        def tell_and_hear(store: dist.Store) -> list[bytes] | None:
            if read is not None:
                store.delete_key(read)
            store.set(f"{key}/{self._board.rank}", mine.decode())
            return _hear(store, keys)

        said = self._store.together(tell_and_hear, _LOOK_S)
        with LongWait(self._board, where) as wait:
            while said is None:
                self._look_around(wait, where, fail)
                self._look_for_ended(keys, where, fail)
                said = self._store.together(lambda store: _hear(store, keys), _LOOK_S)
        return said

    def _look_around(self, mine: LongWait, where: str, fail: Fail) -> None:
        silent = mine.seconds > self._board.timeout_s
        if silent or self._board.is_alarmed():
            raise fail(where, silent)
        mine.look()
        for rank, wait in self._board.waits().items():
            if wait.launched > self._board.launched and wait.agreed < self._board.agreed:
                error = MismatchError(
                    f"{self._board.me}: this rank is at {where}, and rank {rank} has passed by: it waits at "
                    f"{wait.where}. Do the same, in the same order, on every rank."
                )
                # The other rank waits for a collective that this one will not join.
                self._board.post_error(error)
                raise error

    def _look_for_ended(self, keys: Sequence[str], where: str, fail: Fail) -> None:
        """Nothing is under way with a rank that is waited for here, so that no connection tells of its death."""
        of_ranks = dict(zip(self._board.members, keys, strict=True))
        ended = self._board.ended([rank for rank, key in of_ranks.items() if not self._store.check([key])])
        # Asked again: it may have answered, and ended after that.
        if any(not self._store.check([of_ranks[rank]]) for rank in ended):
            raise fail(where, False)


def _hear(store: dist.Store, keys: Sequence[str]) -> list[bytes] | None:
    """What is written at the keys, as soon as all of it is there; None if it is not for `_LOOK_S`."""
    pause_s, deadline = _FIRST_POLL_S, time.monotonic() + _LOOK_S
    # Asked again and again rather than waited for: nobody could interrupt a wait in the store.
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return [bytes(value) for value in store.multi_get(list(keys))]


# Weak: an agreement goes with its board, and that with its group.
_agreements: weakref.WeakKeyDictionary[FailureBoard, StoreAgreement] = weakref.WeakKeyDictionary()


def agreement_of(board: FailureBoard) -> StoreAgreement:
    """The agreements of the board's group in this process."""
    agreement = _agreements.get(board)
    if agreement is None:
        agreement = _agreements[board] = StoreAgreement(board)
    return agreement
