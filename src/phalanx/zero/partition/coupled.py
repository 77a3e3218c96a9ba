"""One optimizer step that evaluates the closure as often as it likes, with all ranks taking part each time.

LBFGS needs all parameters together, so rank 0 runs it and the others follow: before each evaluation rank 0
says so and sends the parameters it wants evaluated. Every rank thus runs the closure equally often, which
collectives inside it rely on, and the loss that rank 0 decides by is the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...comm.collectives import Collectives
from .local import LocalOptimizer
from .update import Update

_EVALUATE, _DONE = 1, 0


class CoupledStep:
    """A step that rank 0 leads. `share` sends rank 0's parameters to all; `device` is that of messages."""

    def __init__(
        self, collectives: Collectives, device: torch.device, share: Callable[[], None]
    ) -> None:
        self._collectives = collectives
        self._device = device
        self._share = share

    def run(self, local: LocalOptimizer, closure: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Every rank calls it. Returns the first loss, averaged, as the optimizer itself returns it."""
        evaluate = partial(self._evaluate, closure, local.update)
        if self._collectives.rank == 0:
            result = local.step_all(closure=lambda: self._lead(evaluate), **arguments)
            # The others wait in `_tell` for the next evaluation; without this they would wait for ever.
            self._tell(_DONE)
            return result
        first = None
        while self._tell(_DONE) == _EVALUATE:
            loss = evaluate()
            first = loss if first is None else first
        return first

    def _lead(self, evaluate: Callable[[], Any]) -> Any:
        self._tell(_EVALUATE)
        return evaluate()

    def _tell(self, command: int) -> int:
        """What rank 0 wants; the other ranks' `command` is ignored."""
        message = torch.tensor([command], dtype=torch.int64, device=self._device)
        work = self._collectives.broadcast(message, 0)
        self._collectives.wait(work, "following rank 0 through a step with a closure")
        return int(message.item())

    def _evaluate(self, closure: Callable[[], Any], update: Update) -> Any:
        # Rank 0 has moved the parameters since the last evaluation; the others must evaluate at the same point.
        self._share()
        if update.is_under_way:
            update.end()
        with torch.enable_grad():
            loss = closure()
        # In double precision the sum of equal losses, and its quotient, are exact.
        total = torch.as_tensor(loss, device=self._device).detach().to(dtype=torch.float64).reshape(1).clone()
        self._collectives.wait(self._collectives.all_reduce(total), "averaging the loss of a closure")
        update.begin()
        mean = total / self._collectives.world
        # Of the type and dtype that the closure gave: the optimizer compares losses with its own tolerances.
        if isinstance(loss, torch.Tensor):
            return mean.to(dtype=loss.dtype, device=loss.device).reshape(loss.shape)
        return type(loss)(mean.item())
