"""How many steps optimizers have made on a wrapper's parameters since its last backward: the same on all ranks.

A plain optimizer is stepped by each rank by itself, and nobody knows its settings. But that it is stepped can be seen, by
torch's own hook of all optimizers. A rank that leaves a step out, makes one more, or makes one by gradients of `no_sync()`
while the others reduce theirs, comes to the next backward with another number; and so does one that makes a backward more,
which meets the next one of the others. The first bucket's tail carries the number (`settings`), so that it is found out
before the others apply anything.

Not counted:

    a step inside a step                 of sharded optimizers, which may run one of their own on some ranks only
    a step during backward               compared otherwise (`in_backward`, and ZeRO's own settings)
    a step with learning rates of 0      changes nothing: by one, checkpoints have an optimizer make its state

Must not know how an optimizer steps, nor by what.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.untraced import untraced
from ...optim.engine import current_backward

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


class StepCount:
    """The steps on one wrapper's parameters (`settings.Teller`)."""

    params: frozenset[int] = frozenset()  # as a teller: it takes the place of no optimizer's settings

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)  # whose reducer keeps this, and its parameters, so that their ids stay theirs
        self._ids = frozenset(map(id, ddp.reducer.params))
        self._group: Any = None
        self._were_uneven = False  # whether ranks may have made other steps before the last pass
        self._told = 0
        self._num_before = 0  # of all steps, those before the last pass
        self.num_steps = 0
        _counts.add(self)
        _known.clear()
        _watch_steps()

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of `optimizer` changes parameters of the wrapper."""
        return any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"])

    def prepare(self, joined: bool) -> None:
        """Nothing is exchanged before a pass."""

    def tell(self) -> int:
        """How many steps were made since the last pass, if it must be the same on all ranks."""
        self._told, self._num_before = self.num_steps - self._num_before, self.num_steps
        ddp = self._ddp()
        # A rank that has joined makes no steps; with a hook, ranks may be meant to train apart for a while (local SGD).
        is_uneven = ddp is None or ddp._join_config.enable or ddp.reducer.strategy.name is not None
        if ddp is not None and ddp.process_group is not self._group:
            # Members of another group may have come from elsewhere. Of the first one, all begin at nought.
            self._were_uneven |= self._group is not None
            self._group = ddp.process_group
        if is_uneven or self._were_uneven:
            self._told = 0
        self._were_uneven = is_uneven
        return self._told

    def settings(self) -> dict[str, str]:
        """What was told last, in words."""
        return {"number of optimizer steps since the last averaged backward": str(self._told)}

    def all_have(self, told: int) -> None:
        """Nothing depends on it."""


@dataclass(slots=True)
class _Stepped:
    """An optimizer: how many parameters it has, those who count its steps, and what each had counted when one began."""

    num_params: int
    counts: tuple[weakref.ref[StepCount], ...]
    before: list[int]


_counts: weakref.WeakSet[StepCount] = weakref.WeakSet()
# Found once per optimizer, not in every step.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = weakref.WeakKeyDictionary()


@cache
def _watch_steps() -> None:
    """From now on hear of every optimizer's steps in this process."""
    register_optimizer_step_pre_hook(_begins)
    register_optimizer_step_post_hook(_ended)


@untraced
def _begins(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _known.get(optimizer)
    if known is None or known.num_params != num_params:
        found = tuple(weakref.ref(count) for count in _counts if count.concerns(optimizer))
        known = _known[optimizer] = _Stepped(num_params, found, [])
    known.before = [0 if (count := one()) is None else count.num_steps for one in known.counts]


@untraced
def _ended(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    known = _known.get(optimizer)
    if known is None or current_backward() != -1 or all(_is_nought(group.get("lr")) for group in optimizer.param_groups):
        return
    for one, before in zip(known.counts, known.before, strict=True):
        if (count := one()) is not None:
            # Not one more than now: steps inside of this one, if there were any, are part of it.
            count.num_steps = before + 1


def _is_nought(rate: Any) -> bool:
    return isinstance(rate, (int, float)) and rate == 0  # of a tensor nobody asks: it may be on a device
