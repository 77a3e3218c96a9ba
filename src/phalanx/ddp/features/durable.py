"""Before anything is kept, what it is made of is known to be right.

On a device a step is judged one step late (`passes.late_checks`). Who writes a state to disk in between would keep a step
that the next one refuses. So the wrapped module asks as well as the wrapper: most scripts save `model.module.state_dict()`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


class VerifyBeforeState:
    """A hook of the wrapped module's `state_dict`. Holds nobody alive, and is nobody's once it was copied or pickled."""

    def __init__(self, wrapper: DistributedDataParallel | None = None) -> None:
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None:
            wrapper.verify()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module is another one, which no wrapper trains; and a weak reference cannot be pickled.
        return (VerifyBeforeState, ())


def verify_before_state(module: torch.nn.Module, wrapper: DistributedDataParallel) -> None:
    """From now on `module.state_dict()` is of steps that are known to be right. An earlier wrapper's hook gives way."""
    hooks = module._state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, VerifyBeforeState)]:
        del hooks[key]
    if wrapper.device_type != "cpu":
        module.register_state_dict_pre_hook(VerifyBeforeState(wrapper))
