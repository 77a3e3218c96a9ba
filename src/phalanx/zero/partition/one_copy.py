"""Parameters that are one copy for all ranks of a host: nobody but the optimizer that shared them may step them.

Any other optimizer is run by every rank, on the same memory at the same time: each update would be made as often as there
are ranks. Parameters stay in that memory when the optimizer that put them there is gone, so this is asked of every step in
the process. Must not know of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import MismatchError

# On a parameter: the address of its one copy. It lies elsewhere once a user has given it memory of its own.
_ADDRESS = "_phalanx_one_copy"


def mark(params: Iterable[torch.Tensor]) -> None:
    """These parameters have just moved into memory that all ranks see."""
    for param in params:
        setattr(param, _ADDRESS, param.data_ptr())


@cache
def refuse_steps_but_of(sharing: type[torch.optim.Optimizer]) -> None:
    """From now on, a step of such parameters by an optimizer of another class is an error."""

    def refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if isinstance(optimizer, sharing):
            return
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                # Empty ones have no address, and nothing to step.
                if getattr(param, _ADDRESS, None) == param.data_ptr() != 0:
                    raise MismatchError(
                        f"{type(optimizer).__name__} was to step parameters of group {number} that are still one copy for all "
                        "ranks, by an earlier shared_parameters=True: every rank would step them. Give them memory of their "
                        "own before, on every rank: `for p in model.parameters(): p.data = p.data.clone()`."
                    )

    register_optimizer_step_pre_hook(refuse)
