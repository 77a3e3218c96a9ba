"""What cannot go on with other ranks is refused before the first step of an elastic run; later, a step after a loss."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from ..checkpoint.capture import Subject, check_parts, state_of
from ..checkpoint.optimizers import members
from ..checkpoint.randomness import generator_state
from ..comm.failure.interruption import awaited
from ..data.loader import Loader
from ..ddp import DistributedDataParallel
from ..ddp.wrappers import known_wrappers
from ..errors import ArgumentTypeError, ConfigError
from ..launch.elastic.member import Member
from ..zero.optimizer import ZeroRedundancyOptimizer

P = ParamSpec("P")
T = TypeVar("T")


def stateful_of(subject: Subject) -> Any:
    """The state of the model's communication hook, if it is one that can be kept and put back."""
    ddp = subject.ddp
    state = None if ddp is None or ddp._hook is None else ddp._hook[0]
    return state if hasattr(state, "state_dict") and hasattr(state, "load_state_dict") else None


def wrappers_of(subject: Subject) -> list[DistributedDataParallel]:
    """The wrappers that are part of the training, in an order that is the same on every rank."""
    if subject.ddp is not None:
        return [subject.ddp]
    inside = () if subject.model is None else subject.model.modules()
    return [one for one in inside if isinstance(one, DistributedDataParallel)]


def refuse_arguments(model: object, extra: object, on_event: object) -> None:
    """Raise ArgumentTypeError for what `elastic.run` cannot decorate with; at once, not when the function is called."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"elastic.run is given the model first, a torch.nn.Module or None, got {model!r:.80}. Decorate with a call: "
            "@elastic.run(model, optimizer), or @elastic.run()."
        )
    check_parts(extra, None, None)
    if on_event is not None and not callable(on_event):
        raise ArgumentTypeError(f"on_event must be a function of an event, got {on_event!r:.80}.")


def checked_function(function: Callable[P, T]) -> Callable[P, T]:
    """What `elastic.run` decorates. Raises ArgumentTypeError if it cannot be called; now, and not when others wait."""
    if not callable(function):
        raise ArgumentTypeError(f"elastic.run decorates a function that trains, got {function!r:.80}.")
    return function


class CaughtLoss:
    """The loss of a rank that the script has caught itself, and goes on as if nothing had happened.

    Then gradients are what this rank alone has, or half of a mean, or none. A step by them would differ between ranks, and
    with a state that every rank holds nobody compares.
    """

    def __init__(self, subject: Subject, member: Member | None) -> None:
        self._wrappers, self._member = wrappers_of(subject), member
        self._asked = 0  # the generation of which it was waited for already

    def look(self) -> None:
        """A step begins, or a commit. Raises what a collective has raised before, if that was the end of this generation."""
        member = self._member
        if member is None or member.formed is None:
            return
        # Only with a sign of it here: that a generation is over is also said when all are to pause, and some are there.
        if not any(ddp.reducer.has_failed or ddp.collectives.board.knows for ddp in self._wrappers):
            return
        # Once: an error of the script's own that it has caught is no loss, and is not to cost time at every step.
        generation, asked = member.formed.generation, self._asked
        self._asked = generation
        error = member.interruption.error() if asked == generation else awaited(member.interruption)
        if error is not None:
            raise error


def refuse_other_loader(loader: object) -> None:
    """Raise ArgumentTypeError for a loader that does not know what has been used."""
    if loader is not None and not isinstance(loader, Loader):
        raise ArgumentTypeError(
            f"loader must be one of worker.loader(…), which knows what has been used, got {type(loader).__name__}. "
            "Leave it out and call training.commit() after each step, with what says where you are in `extra`."
        )


def refuse_another_training(member: Member) -> None:
    """Raise ConfigError if this worker has called a training function before.

    Files of state have the steps of one training. And who comes begins the script from its start: it would call the first
    function while the others are in the second.
    """
    if member.has_trained:
        raise ConfigError(
            "an elastic run has one training, and this worker calls a function decorated with phalanx.elastic.run for the "
            "second time. Do all of it in one such function: training.epochs(...) may be called several times, and "
            "training.step says how far it is."
        )
    member.has_trained = True


def refuse_what_cannot_change(subject: Subject) -> None:
    """Raise ConfigError or ArgumentTypeError if some part of the training depends on the number of ranks for good."""
    loader = subject.parts.get("loader")
    if isinstance(loader, Loader) and not loader.any_world:
        raise ConfigError(
            "an elastic run needs a loader that can go on with another number of ranks in the middle of an epoch: one "
            "of a map-style dataset. A stream, or data of each rank's own, cannot be divided anew."
        )
    for name, value in subject.extra.items():
        is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not is_stateful and generator_state(value) is None:
            raise ArgumentTypeError(
                f"extra {name!r} is a {type(value).__name__}, which cannot be set back in place. Give an object with "
                "state_dict() and load_state_dict(), or a generator of torch, numpy or Python."
            )
    _refuse_hook(subject)
    _refuse_what_cannot_be_copied(subject)
    _refuse_other_wrappers(subject)
    _refuse_outsiders(subject)
    _refuse_other_schedulers(subject)
    for one in subject.optimizers.values():
        if isinstance(one, ZeroRedundancyOptimizer) and one.partition != "element" and one.world_size > 1:
            raise ConfigError(
                f"an elastic run needs an optimizer that can be divided anew by elements; {one.partition_reason}. Use "
                "such a class, or a plain optimizer."
            )
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        raise ConfigError(
            "an elastic run cannot use torch.distributed.rpc: its workers stay the same for good, and neither remote "
            "optimizers nor distributed autograd go on without one of them. Start it without --elastic."
        )
    if subject.wrapper is not None and subject.ddp is None:
        kind = type(subject.wrapper)
        raise ConfigError(
            f"an elastic run needs phalanx.DistributedDataParallel, which can go on over another group; the model is in "
            f"a {kind.__module__}.{kind.__name__}."
        )


def _refuse_hook(subject: Subject) -> None:
    for hook in (ddp._hook for ddp in wrappers_of(subject)):
        if hook is None or isinstance(hook[0], (dist.ProcessGroup, type(None))):
            continue
        if subject.ddp is None:
            raise ConfigError(
                f"of several wrapped models one has a communication hook with a state, a {type(hook[0]).__name__}, which an "
                "elastic run keeps only of a single one. Use a hook without a state."
            )
        if stateful_of(subject) is None:
            raise ConfigError(
                f"the communication hook's state, a {type(hook[0]).__name__}, has no state_dict() and load_state_dict(): "
                "what a step that is undone has changed in it would stay. Give it both, or use one of phalanx.comm.hooks."
            )


def _refuse_what_cannot_be_copied(subject: Subject) -> None:
    """Each of these is copied at every commit, and written for other processes. Asked now, as their errors name no part."""
    found = {f"the {name}": part for name, part in subject.parts.items() if name != "loader"}
    found |= {f"extra {name!r}": value for name, value in subject.extra.items()}
    hook = stateful_of(subject)
    found |= {} if hook is None else {"the communication hook's state": hook}
    for name, value in found.items():
        try:
            pickle.dumps(copy.deepcopy(state_of(value)))
        except Exception as error:  # from a class of the script's own: of any kind
            raise ArgumentTypeError(
                f"the state_dict() of {name}, a {type(value).__name__}, cannot be copied and given to other ranks: "
                f"{error!r:.200}. Leave locks, files, generators and lambdas out of it, and detach tensors."
            ) from error


def _refuse_outsiders(subject: Subject) -> None:
    """A parameter that is stepped and is part of nothing given would neither be undone nor reach who comes."""
    known = {id(param) for param in subject.param_names()}
    # Something extra keeps what it likes, such as a loss with parameters of its own: a state shows their memory.
    states = [value.state_dict() for value in subject.extra.values() if hasattr(value, "state_dict")]
    shown = [one for state in states if isinstance(state, Mapping) for one in state.values()]
    places = {one.data_ptr() for one in shown if isinstance(one, torch.Tensor)}
    for label, optimizer in subject.optimizers.items():
        groups = (group for one in members(optimizer) for group in one.param_groups)
        for number, param in enumerate(param for group in groups for param in group["params"]):
            if id(param) not in known and param.data_ptr() not in places:
                raise ConfigError(
                    f"the {label} steps a parameter of shape {tuple(param.shape)}, its number {number}, that is in no model "
                    "given to elastic.run(), so that a step that is undone would leave it changed. Make it a part of the "
                    "model, or give the module that has it in extra."
                )


def _refuse_other_schedulers(subject: Subject) -> None:
    """One that is not given would be stepped again after a loss; who comes would begin it anew, and learn at other rates."""
    given = [subject.parts.get("scheduler"), *subject.extra.values()]
    if any(one is not None and not hasattr(one, "optimizer") and generator_state(one) is None for one in given):
        return  # it may have schedulers inside
    known = {id(one.optimizer) for one in given if hasattr(one, "optimizer")}
    for label, optimizer in subject.optimizers.items():
        for one in members(optimizer):
            # By this mark torch's schedulers know that they watch the steps of an optimizer.
            if getattr(one.step, "_wrapped_by_lr_sched", False) and id(one) not in known:
                raise ConfigError(
                    f"the {label} has a learning rate scheduler that elastic.run() was not given, so that who comes would "
                    "learn at other rates than the rest. Pass it as scheduler, or further ones in extra."
                )


def _refuse_other_wrappers(subject: Subject) -> None:
    """One that is trained here and not given would stay with a group that is gone."""
    mine = {id(ddp) for ddp in wrappers_of(subject)}
    groups = (group for one in subject.optimizers.values() for each in members(one) for group in each.param_groups)
    stepped = {id(param) for group in groups for param in group["params"]}
    for ddp in known_wrappers():
        if id(ddp) not in mine and any(id(param) in stepped for param in ddp.parameters()):
            raise ConfigError(
                f"an optimizer steps the parameters of a {type(ddp.module).__name__} in a DistributedDataParallel that "
                "elastic.run() was not given, so that it could not go on over another group. Pass the wrapper as model, or "
                "several of them in one torch.nn.ModuleDict."
            )
