"""Parameters that came into the model after it was wrapped: said aloud, once per wrapper, on every rank.

A layer that is added or replaced after wrapping has no place in any bucket. Autograd trains it all the same, on each rank by
that rank's own gradients, so that the ranks drift apart without a word.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

class Newcomers(Listener):
    """Looks for them after the first pass, and ever more rarely: after passes 1, 2, 4, 8, …"""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._num_passes = 0
        self._warned = False

    def pass_ended(self) -> None:
        self._num_passes += 1
        is_power_of_two = self._num_passes & (self._num_passes - 1) == 0
        ddp = self._ddp()
        if self._warned or not is_power_of_two or ddp is None:
            return
        # Only what has a gradient: whoever puts a layer aside for later, or trains it alone, is not told.
        known = ddp.known_parameters()
        new = [
            name
            for name, param in ddp.module.named_parameters()
            if id(param) not in known and name not in ddp.parameters_to_ignore and param.grad is not None
        ]
        if not new:
            return
        self._warned = True
        others = f" and {len(new) - 1} more" if len(new) > 1 else ""
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step - 1}: parameter '{new[0]}'{others} came into the model "
            "after it was wrapped. Its gradients are not averaged, so that the ranks drift apart. Change the model first "
            "and wrap it then, or wrap it again: DistributedDataParallel(model.module)."
        )
        warnings.warn(text, stacklevel=users_stacklevel())
