"""Steps of other optimizers that would train on and be wrong, refused before they change anything.

    the parameter                          what another optimizer's step would do
    is one copy for all ranks of a host    every rank makes it, on the same memory at the same time
    was stepped in backward                the same gradient is used twice

Both outlive the variable that held the sharded optimizer: parameters stay where they are, and a wrapper keeps the optimizer
that steps in its backward, which is why dropping it is not enough.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError
from .overlap.overlap import have_been_used
from .partition.one_copy import is_one_copy


@cache
def refuse_other_steps(sharded: type[torch.optim.Optimizer]) -> None:
    """From now on look at every step that begins in this process. `sharded`: the class that may step a single copy."""

    def refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        who = f"{type(optimizer).__name__}.step()"
        if not isinstance(optimizer, sharded) and any(map(is_one_copy, params)):
            raise ConfigError(
                f"{who}: its parameters are still one copy for all ranks, by an earlier shared_parameters=True: every "
                "rank would step them. Give them memory of their own before, on every rank: "
                "`for p in model.parameters(): p.data = p.data.clone()`."
            )
        if have_been_used(params):
            raise ConfigError(
                f"{who}: an update has been made of these gradients during backward, by a ZeroRedundancyOptimizer with "
                "overlap_with_ddp=True, which its wrapper keeps also where nobody else does. Use that one, or call its "
                "let_go() before another optimizer takes over."
            )

    register_optimizer_step_pre_hook(refuse)
