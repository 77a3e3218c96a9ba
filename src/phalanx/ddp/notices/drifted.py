"""Ranks whose parameters are no longer the same: another learning rate, a file loaded on one rank, a step made on one alone.

`check_drift_every` compares every element, by a collective, and raises; it is asked for. This is what is there without
asking: at a few steps each rank makes numbers of a sample of its parameters, leaves them in the group's store before the
pass is launched, and rank 0 compares once that pass has ended. Between two steps parameters are equal to the bit on all
ranks, so that any difference is one too many.

Silent where parameters are meant to differ for a while: with a registered hook (local SGD averages parameters now and then),
and in `join()`, where ranks without inputs stand still.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener
from .fingerprint import Fingerprint, numbers_of

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

_STEPS = frozenset((4, 32, 256, 2048, 16384))
_MOST_PARAMS = 256  # spread over the model


class Drifted(Listener):
    """Compares a sample of one wrapper's parameters at `_STEPS`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._step = -1
        self._taken: Fingerprint | None = None
        self._is_over = not ddp.collectives.board.reaches_others

    def pass_began(self, joined: bool) -> None:
        ddp = self._ddp()
        if self._is_over or ddp is None:
            return
        reducer = ddp.reducer
        if reducer.step in _STEPS and reducer.strategy.name is None and not joined and not ddp._join_config.enable:
            sample = reducer.params[:: max(1, len(reducer.params) // _MOST_PARAMS)]
            self._step, self._taken = reducer.step, numbers_of(sample)
        if self._taken is not None and ddp.collectives.rank:
            self._leave(ddp, self._taken)

    def _leave(self, ddp: DistributedDataParallel, taken: Fingerprint) -> None:
        numbers = taken.numbers
        if numbers is not None:  # else in a later pass: they are on their way from a device
            self._taken = None
            # A store that is gone is for others to notice.
            with contextlib.suppress(RuntimeError, OSError):
                key = self._key(ddp, ddp.collectives.rank)
                ddp.collectives.board.store_for("parameters").set(key, " ".join(map(str, numbers)))

    def pass_ended(self) -> None:
        ddp = self._ddp()
        if self._taken is None or ddp is None or ddp.collectives.rank:
            return
        numbers = self._taken.numbers
        others = None if numbers is None else self._others(ddp)
        if numbers is None or others is None:
            # Ranks are a pass or so apart; whoever has not come by then has other things to do.
            self._taken = None if ddp.reducer.step > self._step + 8 else self._taken
            return
        self._taken = None
        differing = {rank: theirs for rank, theirs in others.items() if theirs != numbers}
        if differing:
            self._is_over = True
            self._warn(ddp, numbers, differing)

    def _key(self, ddp: DistributedDataParallel, rank: int) -> str:
        return f"{ddp.reducer.number}/{self._step}/{rank}"

    def _others(self, ddp: DistributedDataParallel) -> dict[int, list[int]] | None:
        """The numbers of the other ranks; None unless all of them are there."""
        keys = {rank: self._key(ddp, rank) for rank in range(1, ddp.collectives.world)}
        with contextlib.suppress(RuntimeError, OSError):
            store = ddp.collectives.board.store_for("parameters")
            if store.check(list(keys.values())):
                return {rank: [int(each) for each in store.get(key).decode().split()] for rank, key in keys.items()}
        return None

    def _warn(self, ddp: DistributedDataParallel, mine: list[int], differing: dict[int, list[int]]) -> None:
        reducer = ddp.reducer
        stride = max(1, len(reducer.params) // _MOST_PARAMS)
        theirs = next(iter(differing.values()))
        place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
        name = reducer.plan.specs[min(place * stride, len(reducer.params) - 1)].name
        ranks = ddp.collectives.ranks
        who = f"rank {ranks.numbers[min(differing)]}" + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
        text = (
            f"{ranks.me}: step {self._step}: the parameters of the ranks have drifted apart: '{name}' of {who} is another "
            f"one than that of rank {ranks.own}. Gradients were the same, so the updates were not: give the optimizer the "
            "same settings on every rank (learning rate, schedule, loaded state), step it on every rank, and change "
            "parameters nowhere else. check_drift_every=1 finds the step in which it begins."
        )
        warnings.warn(text, stacklevel=users_stacklevel())
