"""Gradients of a distributed backward pass, which live in its context and not on the parameters.

Under `torch.distributed.autograd` autograd calls no hook of a parameter and leaves `.grad` alone. The reducer
therefore notices such a pass only at its end, and sends every bucket then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ReductionError

if TYPE_CHECKING:
    from ..reducer import Reducer


def current_context() -> int | None:
    """The context of distributed autograd that the calling thread is in; None outside, at next to no cost."""
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None
    import torch.distributed.autograd as dist_autograd

    try:
        return int(dist_autograd._current_context()._context_id())
    except RuntimeError:  # there is none, which only the attempt can tell
        return None


class ContextGradients:
    """What the context `context_id` holds for `params`, None for those it has no gradient of."""

    def __init__(self, context_id: int, params: Sequence[torch.nn.Parameter]) -> None:
        import torch.distributed.autograd as dist_autograd

        found: dict[torch.Tensor, torch.Tensor] = dist_autograd.get_gradients(context_id)
        self._params = params
        self._gradients = [found.get(param) for param in params]

    @property
    def present(self) -> list[int]:
        """Which parameters have a gradient."""
        return [index for index, gradient in enumerate(self._gradients) if gradient is not None]

    @contextmanager
    def on_parameters(self) -> Iterator[None]:
        """Inside, `.grad` of each parameter is its gradient of the context; what it becomes goes back there."""
        # By value too: with gradients that are views of buckets, their memory is in use meanwhile.
        held = [None if param.grad is None else (param.grad, param.grad.clone()) for param in self._params]
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient
        try:
            yield
            self._give_back()
        finally:
            for param, pair in zip(self._params, held, strict=True):
                param.grad = None if pair is None else pair[0].copy_(pair[1])

    def _give_back(self) -> None:
        for param, gradient in zip(self._params, self._gradients, strict=True):
            if param.grad is None or param.grad is gradient:
                continue
            if gradient is None:
                raise ReductionError(
                    f"a parameter of shape {tuple(param.shape)} was used by other ranks and not by this one, and a "
                    "context of distributed autograd takes no gradient from outside. Use it on every rank, "
                    "for example by adding 0 * parameter.sum() to the loss."
                )
            gradient.copy_(param.grad)


@contextmanager
def gradients_of_context(context_id: int, reducer: Reducer) -> Iterator[None]:
    """Inside, gradients are where the reducer looks for them, wherever the backward left them."""
    remote = ContextGradients(context_id, reducer.params)
    for index in remote.present:
        reducer.mark_arrived(index)
    with remote.on_parameters():
        yield
