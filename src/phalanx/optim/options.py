"""An optimizer's options in a form that ranks can compare."""

from __future__ import annotations

from typing import Any

import torch

_SIMPLE = (bool, int, float, complex, str, type(None))


def own_options(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of the class's own options. What else users put into groups is theirs, and may be a rank's own."""
    return tuple(sorted(optimizer.defaults))


def comparable(value: Any) -> Any:
    """The value in a form that ranks can compare; of what has none, the name of its kind."""
    # As Python has it: NumPy's numbers are equal to those that came by JSON (`zero.join`), but not written alike.
    if isinstance(value, float):
        return float(value)
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(comparable(part) for part in value)
    if isinstance(value, torch.Tensor):
        # On a device, looking would make the host wait in every step.
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else f"a tensor on {value.device.type}"
    return type(value).__name__
