"""What ranks have to agree on in every step beside the plan: told in a bucket's tail, at no collective's cost.

An optimizer of sharded state gives each rank a part of one update, so its options must be the same everywhere, in every
step. It tells the reducer that reduces its parameters a few bits made of them; the first bucket's tail carries these, and
every rank finds out in the backward itself, before any of the step is applied.

    a pass begins          has changed on this rank how gradients are reduced, or what else was said of it in `words`?
    before buckets leave   if so, ranks agree on it;
                           `digest` is made from all who tell something, and stays for the pass
    came back different    `differ`: ranks exchange what the bits stood for, and name it, unless only what each rank did by
                           itself differs, and is found to be harmless (`Witness`)
    came back equal        whoever told something is told that all ranks have it

Must not know what settings mean.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...comm.failure.agreement import differences, encode
from ...errors import MismatchError
from ..buckets.tail import SETTINGS_BITS
from ..reducer import Listener, Question, Reducer

_EXCHANGE_S = 5.0


class Teller(Protocol):
    """Somebody whose settings must be equal on all ranks. `params`: the ids of the parameters that they are for."""

    params: frozenset[int]

    def prepare(self, joined: bool) -> None:
        """Before buckets of a pass leave; with `joined`, of one for which this rank has no inputs. May be a collective."""

    def tell(self) -> int:
        """A number made of the settings as they are now; other settings, as good as surely another number."""

    def settings(self) -> dict[str, str]:
        """The settings `tell` was made of last, in words."""

    def all_have(self, told: int) -> None:
        """All ranks have told the same."""


class Witness(Teller, Protocol):
    """A teller of what ranks did, each by itself: that they did not do the same need not be a mistake."""

    def evidence(self) -> dict[str, str]:
        """What ranks look at beside the settings if these differ."""

    def is_harmless(self, evidence: Sequence[Mapping[str, str]]) -> bool:
        """Whether nothing comes of the difference, by the evidence of all ranks. Every rank asks, with the same."""


class TailSettings(Listener):
    """The settings that one reducer's tails carry."""

    def __init__(self, reducer: Reducer, witness: Witness, *tellers: Teller) -> None:
        self._reducer = weakref.ref(reducer)
        # Not weak: memory is freed at other moments on other ranks, and who tells must be the same on all.
        self._witness = witness
        self._tellers = [witness, *tellers]
        self._told: list[tuple[Teller, int]] = []
        self._words: dict[str, str] = {}
        self._question: Question | None = None  # of the last pass that began
        self.digest = 0
        self.plan_adopted()

    def add(self, teller: Teller, words: Mapping[str, str] | None = None) -> None:
        """From the next backward on, carry what `teller` tells. Every rank adds the same, in the same order.

        `words`: as in `compare`.
        """
        if words:
            self.compare(words)
        # Parameters have one optimizer: the latest.
        self._tellers = [known for known in self._tellers if not known.params & teller.params]
        self._tellers.append(teller)

    def compare(self, words: Mapping[str, str]) -> None:
        """Settings that stay as they are: compared once, before the next backward sends anything."""
        self._words = {**self._words, **words}  # another dict, which is how the strategy knows that it has changed

    @property
    def _owner(self) -> Reducer:
        reducer = self._reducer()
        assert reducer is not None, "a listener lives with its reducer"
        return reducer

    def plan_adopted(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            # The first: of a reduction that steps bucket by bucket, none has been stepped when it is back.
            reducer.buckets[0].tail.settings = self

    def pass_began(self, joined: bool) -> None:
        # Now, and not when buckets leave: what is changed after a backward that raised is for the next.
        self._question = self._owner.strategy.question(self._words)

    def launches_begin(self, joined: bool) -> None:
        if self._question is not None:
            self._owner.strategy.agree(self._question)
        for teller in self._tellers:
            teller.prepare(joined)
        self._told = [(teller, teller.tell()) for teller in self._tellers]
        numbers = [told for _, told in self._told]
        # One number as it is: most programs have one optimizer.
        whole = numbers[0] if len(numbers) == 1 else zlib.crc32(repr(numbers).encode())
        self.digest = (whole ^ whole >> SETTINGS_BITS) & (1 << SETTINGS_BITS) - 1

    def pass_ended(self) -> None:
        for teller, told in self._told:
            teller.all_have(told)
        self._told.clear()

    def pass_failed(self) -> None:
        self._told.clear()

    def differ(self, step: int) -> MismatchError | None:
        """The error for ranks whose digests differ, naming what does; None if it is harmless. Every rank calls it."""
        mine: dict[str, str] = {}
        for teller, _ in self._told:
            mine |= teller.settings()
        numbers = [told for teller, told in self._told if teller is not self._witness]
        board = self._owner.collectives.board
        said = board.exchange("settings", json.dumps([mine, numbers, self._witness.evidence()]), _EXCHANGE_S)
        where = f"{board.me}: step {step}"
        if len(said) < board.world:
            return MismatchError(f"{where}: the settings of the ranks differ; of this rank: {json.dumps(mine)}.")
        words, others, evidence = zip(*(json.loads(said[each]) for each in board.members), strict=True)
        # Found a pass late, on a device, the difference may be anybody's: the numbers of that pass are gone.
        is_of_witness = len(numbers) == len(self._tellers) - 1 and all(other == numbers for other in others)
        if is_of_witness and self._witness.is_harmless(evidence):
            return None
        told = differences([encode("the settings of the optimizer", each) for each in words], board.members)
        remedy = "Change settings, and call backward() and step(), on every rank alike."
        return MismatchError(f"{where}: {told}. This backward has updated nothing. {remedy}")


def carry(reducer: Reducer, teller: Teller, words: Mapping[str, str] | None = None) -> None:
    """Have the tails of `reducer` carry what `teller` tells, and its next backward compare `words`."""
    for listener in reducer.listeners:
        if isinstance(listener, TailSettings):
            listener.add(teller, words)


def compare(reducer: Reducer, words: Mapping[str, str]) -> None:
    """Have the next backward of `reducer` compare settings that each rank has made by itself."""
    for listener in reducer.listeners:
        if isinstance(listener, TailSettings):
            listener.compare(words)
