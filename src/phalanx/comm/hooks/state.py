"""What every stateful hook's state has in common: its group, its step, and how it is saved."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...errors import ConfigError, StateError
from ..bucket import GradBucket
from ..collectives import Collectives
from .compress.residual import Residuals
from .group import GroupLike, check_group, collectives_from


class HookState(abc.ABC):
    """State that a hook keeps between steps, on one rank.

    `state_dict` is this rank's own: residuals differ between ranks, so each saves and loads its own.
    Pickling leaves the process group behind; the copy belongs to the default group of the process
    that unpickles it, until `process_group` is set. `iter` counts the steps done with this state.
    """

    # The keys of what `tensors` returns.
    kinds: ClassVar[tuple[str, ...]] = ("residuals",)

    def __init__(self, process_group: GroupLike) -> None:
        check_group(process_group)
        self.process_group = process_group
        self.iter = 0
        self.residuals = Residuals()
        self._iter_before: int | None = None  # between `begin_step` and its end
        # By name, the parameters that had it, the last one last.
        self._served: dict[str, list[weakref.ref[torch.Tensor]]] = {}

    def collectives(self) -> Collectives:
        """The collectives of the state's group, or of the default group."""
        return collectives_from(self.process_group)

    def count_step(self, bucket: GradBucket) -> None:
        """Called once for each bucket; the last one of a step ends it."""
        self._serve(bucket)
        if bucket.is_last():
            self.iter += 1

    def _serve(self, bucket: GradBucket) -> None:
        """Refuse to go to and fro between two models: what is owed to one would be given to the other.

        To go from one to another is allowed: that may be the next model, made of the one before.
        """
        for name, parameter in zip(bucket.names()[:1], bucket.parameters(), strict=False):
            served = self._served.setdefault(name, [])
            if served and served[-1]() is parameter:
                continue
            if any(one() is parameter for one in served):
                kind = type(self).__name__
                raise ConfigError(
                    f"one {kind} is registered with the wrappers of two models, which both have a parameter {name!r}: what "
                    f"compression has left of the gradients of one would be added to the other's. Make a {kind} per wrapper."
                )
            served.append(weakref.ref(parameter))

    def begin_step(self) -> None:
        """A backward begins whose results may be thrown away. Whoever runs it says so, and how it ends."""
        if self._iter_before is not None:
            self.give_up_step()  # nobody said how the last one ended, so that nobody has its results
        self.residuals.begin()
        self._iter_before = self.iter

    def keep_step(self) -> None:
        """Its results are used: what the hook has kept of it counts. Nothing if no step is open."""
        self.residuals.keep()
        self._iter_before = None

    def give_up_step(self) -> None:
        """It failed, or nobody uses its results: go on as if it had not been. Nothing if no step is open."""
        self.residuals.restore()
        if self._iter_before is not None:
            self.iter, self._iter_before = self._iter_before, None

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, without the group."""

    @abc.abstractmethod
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is kept between steps, itself or copies: kind -> parameter name -> tensor."""

    @abc.abstractmethod
    def load_tensors(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over what `tensors` of an equal class returned; all of it has been checked."""

    def state_dict(self) -> dict[str, Any]:
        """All that continuing bit for bit needs, beside the constructor's arguments. Copies."""
        return {key: _copied(value) for key, value in self.live_state_dict().items()}

    def live_state_dict(self) -> dict[str, Any]:
        """The same without copies, for whoever makes a copy before the next step."""
        step = self.iter if self._iter_before is None else self._iter_before
        return {"hook_state": type(self).__name__, "iter": step, **self.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises StateError and changes nothing if it does not fit."""
        kind = type(self).__name__
        given = state.get("hook_state", "something else") if isinstance(state, Mapping) else type(state).__name__
        if given != kind:
            raise StateError(
                f"expected the state_dict of a {kind}, got one of {given!r}. Load each state from its own file."
            )
        step = state.get("iter")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"the state_dict of {kind} has 'iter' {step!r}, expected a count of steps.")
        # All of it is checked before anything is changed.
        for name in self.kinds:
            _check_tensors(kind, name, state.get(name))
        self.load_tensors({name: state[name] for name in self.kinds})
        self.iter, self._iter_before = step, None
        self._served.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config(), "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        type(self).__init__(self, group, **saved["config"])
        self.load_state_dict(saved["state"])


def _copied(value: Any) -> Any:
    return {name: tensor.clone() for name, tensor in value.items()} if isinstance(value, Mapping) else value


def check_number(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a setting outside [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        limits = f" at least {low}" if high == float("inf") else f" between {low} and {high}"
        raise ConfigError(f"{name} must be a number{'' if low == -high else limits}, got {value!r}.")


def _check_tensors(kind: str, name: str, tensors: object) -> None:
    if isinstance(tensors, Mapping) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    ):
        return
    raise StateError(f"the state_dict of {kind} has no tensors by parameter name under {name!r}.")
