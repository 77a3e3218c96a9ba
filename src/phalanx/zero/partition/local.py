"""The optimizer that a rank really runs, on its own part of the parameters only.

Owns the instance of the user's class and keeps its options equal to those the user sees. Must not know
where parameters and gradients come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from .param_table import in_our_words
from .shard import Shard
from .update import Update

# The code of every wrapper that torch puts around a class's step to run hooks.
_RUNS_HOOKS = getattr(torch.optim.Optimizer.profile_hook_step(len), "__code__")  # noqa: B009  # of a callable, for mypy


def runs_hooks(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether torch has put the hooks around the step of the class."""
    # Not by the marks that it leaves: a step that passes for another one (`functools.wraps`) has those of the other one.
    return getattr(optimizer_class.step, "__code__", None) is _RUNS_HOOKS


class Stepper(Protocol):
    """In place of `LocalOptimizer.step_some` and of the gather, for the element partition. On every rank, or on none.

    Whoever must know at every moment how far a step has come (`elastic.place`) steps shards piece by piece.
    """

    @property
    def is_stepping(self) -> bool:
        """Whether the step under way is stepped by it; if not, as if it were not there."""

    def begin(self, shards: Sequence[Shard], arguments: Mapping[str, Any]) -> None:
        """All gradients are there, and nothing has been changed by the step yet. Every rank is here."""

    def step(self, shard: Shard, arguments: Mapping[str, Any]) -> None:
        """Step the slices of a shard that have a gradient, and bring edges back into the parameters."""

    def end(self) -> None:
        """All shards have been stepped: bring the other ranks' parameters here. Every rank is here."""


class LocalOptimizer:
    """One instance of `optimizer_class` over this rank's tensors, in the user's groups."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[dict[str, Any]],
        params_by_group: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        local = [{**_options(group), "params": list(params)} for group, params in zip(groups, params_by_group, strict=True)]
        # Groups, never a bare list: an optimizer takes an empty group, but refuses an empty list.
        with in_our_words(optimizer_class.__name__):
            self.optim = optimizer_class(local, **defaults)
        # The list itself: `step_some` shows the optimizer another one for the time of a step.
        self.groups = self.optim.param_groups
        self._params = [list(params) for params in params_by_group]
        # Who steps shards piece by piece in its stead. Here, as this object stays when the partition is made anew.
        self.stepper: Stepper | None = None
        # What has become of the latest step, for the same reason.
        self.update = Update()
        # Which buckets take part in a step, from which of them this rank would step: the same on all ranks.
        self.agree_on_due: Callable[[list[bool]], list[bool]] = list
        # Returns when all ranks are known to make the step under way; raises if they do not.
        self.await_others: Callable[[], None] = lambda: None
        # The options of the step under way, as it began.
        self._begun_with = [_options(local) for local in self.groups]
        self.push(groups)

    def asks(self, agree_on_due: Callable[[list[bool]], list[bool]], await_others: Callable[[], None]) -> None:
        """Ask these before a step."""
        self.agree_on_due, self.await_others = agree_on_due, await_others

    def pull(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over the options that the user may have edited."""
        for local, group in zip(self.groups, groups, strict=True):
            # What was taken out of a group (`initial_lr`, for another schedule) would be back with the next `push`.
            for key in local.keys() - group.keys() - self.optim.defaults.keys():
                del local[key]
            local.update(_options(group))
        self._begun_with = [_options(local) for local in self.groups]

    def push(self, groups: Sequence[dict[str, Any]]) -> None:
        """Show the user the options as the optimizer left them, those it added included."""
        for local, group in zip(self.groups, groups, strict=True):
            group.update(_options(local))

    def add_group(self, group: dict[str, Any]) -> None:
        """A further group, still without tensors of this rank."""
        self.optim.add_param_group({**_options(group), "params": []})
        self._params.append([])

    def use_params(self, params_by_group: Sequence[Sequence[torch.Tensor]]) -> None:
        """Work on other tensors from now on; their state is set by whoever moves it."""
        self._params = [list(params) for params in params_by_group]
        for local, params in zip(self.groups, self._params, strict=True):
            local["params"] = list(params)
        # State is kept under the old tensors. Left there, it would keep them, and their memory, alive.
        self.optim.state.clear()

    def begin_update(self) -> None:
        """Outside of backward: from here on parameters are changed."""
        self.await_others()
        self.update.begin()

    def step_some(self, active: Mapping[int, Sequence[torch.Tensor]], **arguments: Any) -> None:
        """One step on a part of the tensors, by group, as if there were no others."""
        if not active:
            return
        # Neither the user's hooks on `optim` nor its state_dict() may be left with half of the groups if a step raises.
        try:
            for index, params in active.items():
                # With the options of the whole step: a class that counts its steps in a group is to count no parts.
                self.groups[index].clear()
                self.groups[index].update(self._begun_with[index], params=params)
            self.optim.param_groups = [self.groups[index] for index in active]
            self._step(**arguments)
        finally:
            self.optim.param_groups = self.groups
            for index in active:
                self.groups[index]["params"] = self._params[index]

    def step_all(self, *positional: Any, **arguments: Any) -> Any:
        """One step on everything, exactly as the user called it."""
        return self._step(*positional, **arguments)

    def _step(self, *positional: Any, **arguments: Any) -> Any:
        optim = self.optim
        # Torch has wrapped the step of the class to run hooks, also those that users registered for all optimizers: these
        # have been run for the optimizer that users see. Run again, for each bucket, one that scales gradients would scale
        # them twice. Whoever puts hooks on this very instance gets torch's way.
        step = getattr(type(optim).step, "__wrapped__", None) if runs_hooks(type(optim)) else None
        if step is None or optim._optimizer_step_pre_hooks or optim._optimizer_step_post_hooks or "step" in vars(optim):
            return optim.step(*positional, **arguments)
        for hook in _for_parts(torch_optimizer._global_optimizer_pre_hooks):
            hook(optim, (optim,), arguments)
        result = step(optim, *positional, **arguments)
        for hook in _for_parts(torch_optimizer._global_optimizer_post_hooks):
            hook(optim, (optim,), arguments)
        return result

    @property
    def num_state_bytes(self) -> int:
        """Memory of the state that this rank holds."""
        seen: dict[int, int] = {}
        _count(list(self.optim.state.values()), seen)
        return sum(seen.values())


def _for_parts(hooks: Mapping[int, Any]) -> list[Any]:
    """Those that only look, and want to see the parts of a step too: our own, which measure (`observe.live.seen`)."""
    return [hook for hook in hooks.values() if getattr(hook, "sees_parts", False)]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # Names belong to the user's list of parameters, which is not this rank's.
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _count(value: Any, seen: dict[int, int]) -> None:
    if isinstance(value, torch.Tensor):
        # By identity: a tensor that two states share is counted once.
        seen[id(value)] = value.numel() * value.element_size()
    elif isinstance(value, Mapping):
        _count(list(value.values()), seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _count(item, seen)
