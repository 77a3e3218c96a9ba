"""How messages name the ranks of a group: by their numbers in the world, which users know from logs and launchers.

Within a group ranks are counted from 0. Collectives are given those numbers; whatever is said to a user holds the others,
and so does `CommunicationError.ranks`. Must not know what is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one group, as users know them."""

    numbers: tuple[int, ...]
    """By their place in the group."""
    own: int
    """Of this process."""
    me: str
    """How a message of this rank begins. Of a group that is not the whole world, with its members."""


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """The ranks of `group`, of which this process is one."""
    try:
        numbers = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        numbers = tuple(range(group.size()))  # made by somebody else: nobody knows other numbers
    own = numbers[group.rank()]
    is_world = not dist.is_initialized() or len(numbers) >= dist.get_world_size()
    return Ranks(numbers, own, f"rank {own}" if is_world else f"rank {own} (of the group of ranks {_listed(numbers)})")


def _listed(numbers: Sequence[int]) -> str:
    shown = [*map(str, numbers)]
    return ", ".join(shown if len(shown) <= _MOST_LISTED else [*shown[: _MOST_LISTED - 1], "…", shown[-1]])
