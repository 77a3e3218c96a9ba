"""Whom a hook talks to: what users register as its state, turned into collectives."""

from __future__ import annotations

import torch.distributed as dist

from ...errors import ArgumentTypeError, ConfigError
from ..collectives import Collectives
from ..torch_backend import collectives_for

# What a hook without a state of its own accepts as its state. None stands for the default group.
GroupLike = dist.ProcessGroup | Collectives | None


def collectives_from(group: GroupLike) -> Collectives:
    """The collectives of a process group, of the default group for None, or those given as they are."""
    if isinstance(group, Collectives):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ConfigError(
                "a communication hook without a process group uses the default one, and none is initialised. "
                "Call torch.distributed.init_process_group first, or give the hook a group."
            )
        group = dist.group.WORLD
        assert group is not None, "initialised"
    check_group(group)
    return collectives_for(group)


def check_group(group: object) -> None:
    """Refuse what a hook cannot talk through."""
    if group is not None and not isinstance(group, (Collectives, dist.ProcessGroup)):
        raise ArgumentTypeError(
            "a communication hook's group must be a process group, Collectives or None, got "
            f"{type(group).__name__}. Register the hook with its group, or with its own kind of state."
        )
