"""Optimizers that torch's own `_apply_optimizer_in_backward` has put on parameters, stepped at the right moment.

Alone, they step as soon as a gradient is accumulated, which under data parallelism is before it is averaged.
The wrapper takes them over: they step when the mean is there. Must not import torch's module, which is loaded
already wherever one of its optimizers exists.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

import torch

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"
_ATTRIBUTE = "_in_backward_optimizers"


class TorchInBackward:
    """The optimizers on `params`, as torch keeps them: a list in an attribute of each parameter."""

    max_norm: float | None = None  # torch's own has no limit

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.params = list(params)

    def hand_over(self, params: Collection[torch.nn.Parameter]) -> None:
        """Take off the hooks from which they would step too early; the parameters are the wrapper's, all of them."""
        handles = getattr(sys.modules.get(_MODULE), "param_to_optim_hook_handle_map", {})
        for param in self.params:
            for handle in handles.get(param, ()):
                handle.remove()

    def gradients_ready(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Step those of these parameters that have an optimizer, and free their gradients."""
        for param in params:
            optimizers = getattr(param, _ATTRIBUTE, ())
            if optimizers and param.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                param.grad = None

    def backward_ended(self) -> None:
        """Nothing waits for the end of backward."""

    def backward_raised(self) -> None:
        """Nor for anything else."""

    def optimizers_of(self, param: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
        """Those that step this parameter."""
        return list(getattr(param, _ATTRIBUTE, ()))


def torch_in_backward(params: Iterable[torch.nn.Parameter]) -> list[TorchInBackward]:
    """What has been applied to any of `params`: one object for all, or none."""
    found = [param for param in params if hasattr(param, _ATTRIBUTE)]
    return [TorchInBackward(found)] if found else []
