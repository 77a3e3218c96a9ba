"""What an optimizer class allows: cutting inside a tensor, only between tensors, or not at all.

    kind          what it means                                        partition
    ELEMENTWISE   an element's update needs nothing of other elements  element (or parameter, if asked for)
    SEPARABLE     a tensor's update needs nothing of other tensors     parameter
    COUPLED       every tensor's update needs all the others           parameter, all of them with rank 0

Anything not known here is taken to be SEPARABLE, as torch's class takes it to be. Pure: no process group.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import optim

from ...errors import ArgumentTypeError, ConfigError

_DECLARATION = "_phalanx_elementwise"

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])


class Kind(enum.Enum):
    ELEMENTWISE = enum.auto()
    SEPARABLE = enum.auto()
    COUPLED = enum.auto()


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The keys of a parameter's state: those always there once there is a state, and those sometimes there."""

    required: frozenset[str] = field(default=frozenset())
    optional: frozenset[str] = field(default=frozenset())


def _keys(required: str, optional: str = "") -> StateKeys:
    return StateKeys(frozenset(required.split()), frozenset(optional.split()))


# Exactly these classes, not classes derived from them: a subclass may do anything in its step.
_ELEMENTWISE: dict[type[torch.optim.Optimizer], StateKeys] = {
    # Optional is what only some options make, such as momentum or amsgrad.
    optim.SGD: _keys("", "momentum_buffer"),
    optim.Adam: _keys("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    optim.AdamW: _keys("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    optim.Adamax: _keys("step exp_avg exp_inf"),
    optim.NAdam: _keys("step mu_product exp_avg exp_avg_sq"),
    optim.RAdam: _keys("step exp_avg exp_avg_sq"),
    optim.Adagrad: _keys("step sum"),
    optim.Adadelta: _keys("step square_avg acc_delta"),
    optim.RMSprop: _keys("step square_avg", "momentum_buffer grad_avg"),
    optim.Rprop: _keys("step prev step_size"),
    optim.ASGD: _keys("step eta mu ax"),
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Declare that a class updates each element from that element's own parameter, gradient and state only.

    A decorator. State must then be tensors of the parameter's shape, tensors without dimensions, or plain
    values; the class may be stepped bucket by bucket, each with the options that its groups had before the step.
    Classes derived from it declare themselves.
    """
    check_class(optimizer_class)
    # The value is the class itself: a derived class inherits the attribute, and is not declared by it.
    setattr(optimizer_class, _DECLARATION, optimizer_class)
    return optimizer_class


def kind_of(optimizer_class: type[torch.optim.Optimizer]) -> Kind:
    """What the class allows."""
    # Derived classes too: whatever they change, they evaluate the closure several times, with all parameters moved.
    if issubclass(optimizer_class, optim.LBFGS):
        return Kind.COUPLED
    declared = getattr(optimizer_class, _DECLARATION, None) is optimizer_class
    return Kind.ELEMENTWISE if declared or optimizer_class in _ELEMENTWISE else Kind.SEPARABLE


def state_keys(optimizer_class: type[torch.optim.Optimizer]) -> StateKeys | None:
    """The keys that a state of this class has, or None for a class that is not known here."""
    return _ELEMENTWISE.get(optimizer_class)


def steps_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that acts element by element also steps by sparse gradients, and keeps a dense state."""
    # A momentum of sparse gradients is sparse itself.
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return type(optimizer) in (optim.SGD, optim.Adagrad) and not momentum


@dataclass(frozen=True, slots=True)
class PartitionChoice:
    """A partition and why it is that one. `is_free`: it was not asked for, so that another may be taken later."""

    partition: str
    kind: Kind
    reason: str
    is_free: bool = False


def check_class(optimizer_class: Any) -> None:
    """Refuse what is not an optimizer class."""
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer_class must be a class derived from torch.optim.Optimizer, got {optimizer_class!r}. "
            "Give the class itself, for example torch.optim.Adam."
        )


def choose_partition(
    optimizer_class: type[torch.optim.Optimizer], wanted: str, world: int, defaults: dict[str, Any]
) -> PartitionChoice:
    """The partition to use: as wanted if the class allows it, or the best one for "auto"."""
    if wanted not in ("auto", "element", "parameter"):
        raise ConfigError(f'partition must be "auto", "element" or "parameter", got {wanted!r}.')
    name, kind = optimizer_class.__name__, kind_of(optimizer_class)
    # Before all other checks: whole parameters suit every class.
    if wanted == "parameter":
        return PartitionChoice("parameter", kind, "asked for")
    if wanted == "element" and kind is not Kind.ELEMENTWISE:
        because = (
            "each of its steps needs all parameters together"
            if kind is Kind.COUPLED
            else "it is not known to update each element by itself, so a tensor must not be cut"
        )
        raise ConfigError(
            f'partition="element" is not possible with {name}: {because}. Use partition="parameter" or "auto", '
            "or, if the class does act element by element, declare it with phalanx.zero.elementwise."
        )
    if defaults.get("differentiable"):
        if wanted == "element":
            raise ConfigError(
                'partition="element" is not possible with differentiable=True: autograd would not see the whole '
                'parameters. Use partition="parameter".'
            )
        return PartitionChoice("parameter", kind, "differentiable=True needs whole parameters")
    if wanted == "element":
        return PartitionChoice("element", kind, "asked for")
    if kind is not Kind.ELEMENTWISE:
        return PartitionChoice("parameter", kind, f"{name} is not known to act element by element")
    # Nothing is saved by cutting. Whole parameters are stepped where they are, by torch's own fast paths.
    if world == 1:
        return PartitionChoice("parameter", kind, "one rank owns everything")
    return PartitionChoice("element", kind, f"{name} acts element by element", is_free=True)
