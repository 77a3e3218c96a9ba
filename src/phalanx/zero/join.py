"""Uneven inputs: what a rank that has run out of them does about the others' optimizer steps.

It goes on stepping its part of the parameters. By which options is known to the ranks that still train: their schedulers
go on, its own does not. So before options are used, ranks that have changed theirs say so, and one of them tells all.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from ..comm.collectives import Collectives
from ..ddp.module import DistributedDataParallel
from ..ddp.wrappers import known_wrappers

_WHERE = "telling joined ranks the options of ZeroRedundancyOptimizer"
# Texts are sent in multiples of this: the first collective of each size costs an agreement (`comm.failure.agreement`).
_BLOCK_BYTES = 512

Groups = Sequence[dict[str, Any]]


class JoinedStep(JoinHook):
    """Calls `step`, which steps this rank's part, whenever the ranks still training step theirs."""

    def __init__(self, step: Callable[[], None], wrappers: Sequence[DistributedDataParallel]) -> None:
        super().__init__()
        self._step = step
        self._wrappers = wrappers
        # A joined rank steps its part with means that it did not help to make, so each reducer must give it those.
        for wrapper in wrappers:
            wrapper.reducer.joined_take_means = True

    def main_hook(self) -> None:
        # Forwards under no_sync() are followed by no step.
        if not self._wrappers or any(wrapper.require_forward_param_sync for wrapper in self._wrappers):
            self._step()


def wrappers_of(params: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """The wrappers that reduce `params`, the latest first; of a parameter that several had in turn, the latest."""
    left, found = set(params), []
    for wrapper in known_wrappers():
        if not left.isdisjoint(wrapper.reducer.params):
            left.difference_update(wrapper.reducer.params)
            found.append(wrapper)
    return found


class Attendance(enum.Enum):
    """Who has inputs in the step under way. Told anew before each step, by whoever begins it.

    ALL         every rank: there is no join
    TRAINING    this rank has, and others may have joined
    JOINED      this rank has not, and follows those that have
    """

    ALL = enum.auto()
    TRAINING = enum.auto()
    JOINED = enum.auto()


class FollowedOptions:
    """The options of the ranks that still train, on every rank. `keys`: those of the optimizer's class, the same everywhere.

    Only the ranks that have joined take options over. What ranks that train have is compared elsewhere (`settings`), and
    not made equal here: a difference between them is a mistake of the program.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._known = ""  # what was told last

    def exchange(self, groups: Groups, keys: Sequence[str], joined: bool) -> None:
        """Every rank calls it; ranks that have `joined` have the others' options afterwards."""
        mine = json.dumps([_simple_options(group, keys) for group in groups])
        told = self._told(mine if not joined and mine != self._known else "")
        if told is None:
            return
        self._known = told if joined else mine
        if joined:
            for group, options in zip(groups, json.loads(told), strict=True):
                group.update({key: _as(group[key], value) for key, value in options.items()})

    def any_of(self, flags: Sequence[bool], joined: bool) -> list[bool]:
        """Of each flag, whether a rank that trains has it set. Every rank calls it, with as many."""
        mine = [0.0] * len(flags) if joined else [float(flag) for flag in flags]
        votes = torch.tensor(mine, dtype=torch.float32, device=self._device)
        self._collectives.wait(self._collectives.all_reduce(votes), _WHERE)
        return [vote > 0 for vote in votes.tolist()]

    def _told(self, text: str) -> str | None:
        """The text of the first rank that has one, on every rank; None if nobody has."""
        collectives, data = self._collectives, text.encode()
        sizes = torch.zeros(collectives.world, dtype=torch.float32, device=self._device)
        sizes[collectives.rank] = len(data)
        collectives.wait(collectives.all_reduce(sizes), _WHERE)
        listed = [int(size) for size in sizes.tolist()]
        source = next((rank for rank, size in enumerate(listed) if size), None)
        if source is None:
            return None
        padded = torch.zeros(-(-listed[source] // _BLOCK_BYTES) * _BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        if source == collectives.rank:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        padded = padded.to(self._device)
        collectives.wait(collectives.broadcast(padded, source), _WHERE)
        return bytes(padded[: listed[source]].tolist()).decode()


def _simple_options(group: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    found = {key: _simple(group[key]) for key in keys if key in group}
    return {key: value for key, value in found.items() if value is not ...}


def _simple(value: Any) -> Any:
    """The value as JSON has it; `...` for what only this rank can have (a function, a large tensor)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        # Looking makes the host wait for a device. Under join it waits in every step anyway, for who has joined.
        return value.item() if value.numel() == 1 and not value.is_complex() else ...
    if isinstance(value, (tuple, list)):
        parts = [_simple(part) for part in value]
        return ... if any(part is ... for part in parts) else parts
    return ...


def _as(mine: Any, value: Any) -> Any:
    """`value` in the form that this rank has it: a tensor stays the same tensor, which compiled steps refer to."""
    if isinstance(mine, torch.Tensor):
        with torch.no_grad():
            return mine.fill_(value)
    if isinstance(value, list) and isinstance(mine, (tuple, list)) and len(mine) == len(value):
        return type(mine)(_as(old, new) for old, new in zip(mine, value, strict=True))
    return tuple(value) if isinstance(value, list) else value
