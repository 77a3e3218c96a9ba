"""A backward whose forward went around the wrapper: said aloud, once per wrapper, on every rank where it happens.

`model.module(x)` computes what `model(x)` does and reduces nothing, so that ranks train apart without a word. Gradients of
such a backward stay as autograd left them, as in no_sync().
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


class Bypass(Listener):
    """Hears of backwards that no forward of the wrapper has armed."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._warned = False

    def went_around(self) -> None:
        ddp = self._ddp()
        # Whoever says no_sync() around it wants gradients of this rank alone.
        if self._warned or ddp is None or not ddp.require_backward_grad_sync:
            return
        self._warned = True
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step}: a backward brought gradient to parameters of a "
            "DistributedDataParallel without a forward of the wrapper before it, so its gradients stay on this rank and are "
            "not averaged. Call the wrapper, model(x), in place of model.module(x). Where this rank's own gradients are "
            "meant, or the loss is the same on every rank, run it inside model.no_sync()."
        )
        warnings.warn(text, stacklevel=users_stacklevel())
