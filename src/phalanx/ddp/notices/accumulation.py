"""`no_sync()` where it has no effect, or for ever: said aloud, once per wrapper, on every rank where it happens.

As in torch, the *forward* decides whether its backward is reduced. A `no_sync()` around the backward alone changes nothing,
and one around every forward leaves the ranks to train apart.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

# More micro-batches than anybody adds up between two steps.
_MOST_LOCAL = 256


class Accumulation(Listener):
    """Counts backwards inside `no_sync()` since the last reduced one, and looks where reduced ones run."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._num_local = 0
        self._warned_inside = self._warned_local = False

    def pass_began(self, joined: bool) -> None:
        self._num_local = 0
        ddp = self._ddp()
        if self._warned_inside or joined or ddp is None or ddp.require_backward_grad_sync:
            return
        self._warned_inside = True
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step}: a backward runs inside no_sync() whose forward ran "
            "outside. The forward decides, as in torch: this backward is averaged over the ranks all the same. Put the "
            "forward inside no_sync() as well: with model.no_sync(): loss = criterion(model(x), y); loss.backward()."
        )
        warnings.warn(text, stacklevel=users_stacklevel())

    def local_backward_ended(self) -> None:
        self._num_local += 1
        ddp = self._ddp()
        if self._num_local != _MOST_LOCAL or self._warned_local or ddp is None or not ddp.reducer.unreduced:
            return
        self._warned_local = True
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step}: {_MOST_LOCAL} backwards in a row had their forward "
            "inside no_sync(), and none was averaged over the ranks. If the optimizer steps meanwhile, the ranks train "
            "apart: run the last forward and backward before each step outside no_sync()."
        )
        warnings.warn(text, stacklevel=users_stacklevel())
