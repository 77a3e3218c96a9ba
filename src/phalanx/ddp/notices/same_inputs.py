"""Every rank is given the same samples: a plain DataLoader, or data drawn by the same seed, on each of them.

Then N ranks train as one alone would, in N times its work, and nothing fails. Each rank leaves the numbers of its first
inputs (`first_inputs`) in the group's store before the third of them is reduced; when that has been, rank 0 finds those
of all ranks there, and compares. No rank waits for another, and it happens once.

Inputs that never change are no sign of it: a model may be trained on the whole of its data in every step, or take only its
own parameters. Inputs made different by each rank at random (augmentation under seeds of their own) cannot be told from
different samples.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener
from .first_inputs import FIRST, FirstInputs

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

# After passes 1, 2, 4, … from the third forward on. Ranks that add up unequally many forwards per pass come later.
_MOST_LOOKS = 6


class SameInputs(Listener):
    """Compares the first inputs of the ranks of one wrapper."""

    def __init__(self, ddp: DistributedDataParallel, inputs: FirstInputs) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._inputs = inputs
        self._mine: str | None = None
        self._is_over = not ddp.collectives.board.reaches_others
        self._num_passes = self._num_looks = 0

    def pass_began(self, joined: bool) -> None:
        if self._is_over or self._mine is not None:
            return
        numbers = self._inputs.numbers(FIRST)
        ddp = self._ddp()
        if numbers is None or ddp is None:
            # Not seen by now: inputs into which nobody can look, or a rank without any.
            self._is_over = self._inputs.num_forwards > 2**_MOST_LOOKS
            return
        self._mine = " ".join(map(str, numbers))
        self._is_over = len(set(numbers)) == 1
        rank = ddp.collectives.rank
        if rank and not self._is_over:
            self._is_over = True
            # A store that is gone is for others to notice.
            with contextlib.suppress(RuntimeError, OSError):
                ddp.collectives.board.store_for("inputs").set(self._key(ddp, rank), self._mine)

    def pass_ended(self) -> None:
        if self._is_over or self._mine is None:
            return
        self._num_passes += 1
        ddp = self._ddp()
        if ddp is None or self._num_passes & (self._num_passes - 1):
            return
        self._num_looks += 1
        others = self._others(ddp)
        self._is_over = others is not None or self._num_looks == _MOST_LOOKS
        if others is not None and set(others) == {self._mine}:
            self._warn(ddp)

    @staticmethod
    def _key(ddp: DistributedDataParallel, rank: int) -> str:
        return f"{ddp.reducer.number}/{rank}"

    def _others(self, ddp: DistributedDataParallel) -> list[str] | None:
        """What the other ranks left; None unless all of them did."""
        keys = [self._key(ddp, rank) for rank in range(1, ddp.collectives.world)]
        with contextlib.suppress(RuntimeError, OSError):
            store = ddp.collectives.board.store_for("inputs")
            if store.check(keys):
                return [store.get(key).decode() for key in keys]
        return None

    def _warn(self, ddp: DistributedDataParallel) -> None:
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step - 1}: all {ddp.collectives.world} ranks were given the same "
            f"inputs in each of the first {len(FIRST)} forwards, so that they train on the same samples, as one rank alone "
            "would. Give each rank its part of them: worker.loader(DataLoader(…), model), or a DistributedSampler; or seed "
            "each rank by its number. Where it is meant, warnings.filterwarnings('ignore', '.*given the same inputs') "
            "silences this."
        )
        warnings.warn(text, stacklevel=users_stacklevel())
