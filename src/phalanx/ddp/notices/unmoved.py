"""Parameters that no step changes: an optimizer that has others, or none at all. One warning, on rank 0.

An optimizer made before the model was copied, built again or loaded whole keeps the old parameters. Its steps are without
effect, gradients are averaged all the same, and nothing raises: the loss just stays where it is. Two looks at a sample of
the parameters, far enough apart that nobody adds up gradients for so long; and gradients must be there.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from ...comm.failure.folding import users_stacklevel
from ..passes.listener import Listener
from .fingerprint import Fingerprint, numbers_of

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

_FIRST, _SECOND = 2, 130  # passes; more than 100 backwards that are all averaged come before hardly any step
_MOST_PARAMS = 32  # spread over the model


class Unmoved(Listener):
    """Compares one wrapper's parameters at two steps."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weakly: the reducer's listeners must not keep the wrapper alive.
        self._ddp = weakref.ref(ddp)
        self._first: Fingerprint | None = None
        self._second: Fingerprint | None = None
        # Ranks hold the same, so that one of them knows.
        self._is_over = ddp.collectives.rank != 0

    def pass_began(self, joined: bool) -> None:
        ddp = self._ddp()
        if self._is_over or ddp is None:
            return
        step, params = ddp.reducer.step, ddp.reducer.params
        if step == _FIRST:
            self._first = numbers_of(params[:: max(1, len(params) // _MOST_PARAMS)])
            self._is_over = self._first is None
        elif step == _SECOND and self._first is not None:
            self._second = numbers_of(params[:: max(1, len(params) // _MOST_PARAMS)])
        self._is_over |= step > _SECOND + 8  # on their way from a device for longer than anything takes

    def pass_ended(self) -> None:
        ddp = self._ddp()
        if self._second is None or self._is_over or ddp is None:
            return
        before, now = self._first and self._first.numbers, self._second.numbers
        if before is None or now is None:
            return
        self._is_over = True
        # Gradients of nought move nothing, and that is nobody's mistake.
        if before == now and any(param.grad is not None and bool(param.grad.any()) for param in ddp.reducer.params[:8]):
            self._warn(ddp)

    def _warn(self, ddp: DistributedDataParallel) -> None:
        warnings.warn(
            f"rank 0: step {_SECOND}: no parameter has changed in {_SECOND - _FIRST} backwards, but there are gradients. "
            "No step() was called, the learning rate is 0, or the optimizer has the parameters of another model (of a copy, "
            "or of one that was built or loaded before). Make it from the wrapper: optimizer = Adam(model.parameters()).",
            stacklevel=users_stacklevel(),
        )
