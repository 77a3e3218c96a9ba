"""What a training run consists of, as tensors and texts: the model, its optimizers, and what each rank has for itself.

    component     whose                   tensors
    model         all ranks alike         model/<name>; buffers are rank 0's
    optimizer     alike, or ZeRO's parts  optimizer/<parameter>/<path>, optimizer:<label>/… for several
    buffers, states, gradients, hook, plan, random, scheduler, loader, extra    each rank's own: rank-<n>/<component>/<path>

Names are those of the plain model, without what wrappers and compilers put before them. Nothing is copied here.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from ..comm.hooks import HookState
from ..ddp.messages import torn
from ..ddp.module import DistributedDataParallel
from ..errors import ArgumentTypeError, ConfigError, StateError
from ..optim.in_backward import InBackward
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.overlap.gradient_shards import ScatteredGradient
from .layout import Captured, whole_piece
from .optimizers import capture_optimizer, own_states
from .randomness import capture_randomness, generator_state
from .tree import encode

_COMPILED = "_orig_mod."
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
STATES = "states"  # the component with the optimizers' states of parameters that a rank trains for itself


class Subject:
    """What is saved and restored. Holds it, and knows its names."""

    def __init__(self, model: Any, optimizer: Any, parts: Mapping[str, Any], extra: Mapping[str, Any] | None) -> None:
        self.model, self.wrapper = _unwrap(model)
        self.optimizers = _labelled(optimizer)
        # Schedulers, loaders: whatever has state_dict and load_state_dict.
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.extra = dict(extra or {})
        for name, part in self.parts.items():
            if not _is_stateful(part):
                raise ArgumentTypeError(
                    f"{name} has no state_dict() and load_state_dict(), got {type(part).__name__}. Give an object that has "
                    "both, or leave it out."
                )
        # What steps in backward has used its gradients when backward ends.
        watched = [one for one in self.optimizers.values() if not isinstance(one, InBackward)]
        self._watches = [_Watch(optimizer) for optimizer in watched]

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """Our wrapper, if the model is in one."""
        return self.wrapper if isinstance(self.wrapper, DistributedDataParallel) else None

    def model_keys(self) -> dict[str, str]:
        """The keys of the model's state_dict by their plain names."""
        state = {} if self.model is None else self.model.state_dict(keep_vars=True)
        return {key.replace(_COMPILED, ""): key for key in state}

    def param_names(self) -> dict[torch.Tensor, str]:
        """The plain names of the model's parameters; a shared one has its first."""
        named = [] if self.model is None else self.model.named_parameters()
        return {param: name.replace(_COMPILED, "") for name, param in named}

    def extra_names(self) -> set[str]:
        """What the model's state has beside parameters and buffers: what its get_extra_state() return, of any kind."""
        if self.model is None:
            return set()
        named = (self.model.named_parameters, self.model.named_buffers)
        known = {name.replace(_COMPILED, "") for names in named for name, _ in names(remove_duplicate=False)}
        return self.model_keys().keys() - known

    def own_names(self) -> set[str]:
        """Of the model's state, what may differ between ranks because nobody makes it alike."""
        if self.model is None or self.wrapper is None:
            return set()
        ignored = set(getattr(self.wrapper, "parameters_to_ignore", ()))
        synced = getattr(self.wrapper, "forward_sync_buffers", getattr(self.wrapper, "broadcast_buffers", True))
        buffers = {name for name, _ in self.model.named_buffers()}
        return {name.replace(_COMPILED, "") for name in (ignored if synced else ignored | buffers)} | self.extra_names()

    def check_idle(self) -> None:
        """Raise unless this is a moment between two steps, of which a checkpoint can tell everything."""
        who = "" if self.ddp is None else f"{self.ddp.collectives.me}: "
        for one in self.optimizers.values():
            if isinstance(one, ZeroRedundancyOptimizer) and one.is_torn:
                raise torn(f"rank {one.rank}")
        if not getattr(self.wrapper, "require_backward_grad_sync", True):
            raise StateError(f"{who}save() inside no_sync() would lose gradients that add up there. Save after the step.")
        sharded = [one for one in self.optimizers.values() if isinstance(one, ZeroRedundancyOptimizer)]
        for trainer in (self.ddp, *(wrapper for one in sharded for wrapper in one.wrappers)):
            if trainer is not None:
                trainer.verify()  # on a device, the last step may not have been judged yet
        if self.ddp is None:
            return
        self.ddp.reducer.require_idle()
        # Zeros are what a user has made of them.
        waiting = [name for name, param in self.ddp.reducer.unreduced.items() if _is_something(param.grad)]
        if waiting:
            raise StateError(
                f"{who}save() in the midst of accumulation: '{waiting[0]}' and {len(waiting) - 1} others have gradients of "
                "this rank alone. Save after the step that uses them."
            )
        for one in self.optimizers.values():
            if isinstance(one, ZeroRedundancyOptimizer) and self.has_unused_gradients():
                if any(isinstance(param.grad, ScatteredGradient) for param in one.sharded.table.params):
                    raise StateError(f"{who}save() between backward and step(): each rank has a part of them. Step first.")

    def has_unused_gradients(self) -> bool:
        """Whether there is a gradient that no step has used."""
        return any(watch.sees_unused() for watch in self._watches)


def _is_something(grad: torch.Tensor | None) -> bool:
    if isinstance(grad, ScatteredGradient):
        return grad.pending is not None
    return grad is not None and bool(grad.to_dense().any())


class _Watch:
    """Which gradients an optimizer has used: those that were there, unchanged since, when its last step ended."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._optimizer = weakref.ref(optimizer)
        self._num_passes = 0
        reference = weakref.ref(self)
        handle = optimizer.register_step_post_hook(lambda *_: _stepped(reference))
        weakref.finalize(self, handle.remove)
        # Of gradients that are there already nobody can tell; most likely the last step has used them.
        self.note()

    def _gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Those of all parameters that the optimizer has now: any one of them may be the only one that is trained."""
        optimizer = self._optimizer()
        for group in () if optimizer is None else optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    yield id(param), grad

    def _count_passes(self) -> int:
        """How many backwards have been reduced: a divided gradient is one object for good, and tells nothing itself."""
        optimizer = self._optimizer()
        wrappers = optimizer.wrappers if isinstance(optimizer, ZeroRedundancyOptimizer) else []
        return sum(wrapper.reducer.step for wrapper in wrappers)

    def note(self) -> None:
        # After every step, so that it must stay at a reference and a number per parameter.
        self._num_passes = self._count_passes()
        self._used = {key: (weakref.ref(grad), grad._version) for key, grad in self._gradients()}

    def sees_unused(self) -> bool:
        has_passed = self._count_passes() != self._num_passes
        for key, grad in self._gradients():
            if isinstance(grad, ScatteredGradient):
                if has_passed and not grad.is_zero:
                    return True
                continue
            used, version = self._used.get(key, (None, -1))
            # A weak reference and not an address alone: a new gradient may be where the used one was.
            if used is not None and id(used()) == id(grad) and grad._version == version:
                continue
            # Zeroed in place is another version of nothing.
            if _is_something(grad):
                return True
        return False


def _stepped(reference: weakref.ref[_Watch]) -> None:
    watch = reference()
    if watch is not None:
        watch.note()


def _unwrap(model: Any) -> tuple[torch.nn.Module | None, Any]:
    """The plain model, and the data-parallel wrapper around it if there is one."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, wrapped or not, got {type(model).__name__}.")
    wrapper = None
    while model is not None:
        # By name: torch's own class is what phalanx replaces, and is not imported. Wrappers first: they show the attributes
        # of what they wrap as their own.
        if isinstance(model, DistributedDataParallel) or type(model).__name__ in _WRAPPERS:
            wrapper, model = model, model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            break
    return model, wrapper


def _labelled(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    several = isinstance(optimizer, Mapping)
    found = {f"optimizer:{name}": one for name, one in optimizer.items()} if several else {"optimizer": optimizer}
    for label, one in found.items():
        if not isinstance(one, (torch.optim.Optimizer, InBackward)):
            raise ArgumentTypeError(
                f"{label} must be a torch.optim.Optimizer, what phalanx.optim.apply_in_backward returned, or a dict of "
                f"these, got {type(one).__name__}."
            )
        if hasattr(one, "consolidate_state_dict") and not isinstance(one, ZeroRedundancyOptimizer):
            raise ArgumentTypeError(
                f"{label} is torch's {type(one).__name__}, whose state no rank can tell alone. Use "
                "phalanx.ZeroRedundancyOptimizer, which has the same signature."
            )
    return found


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


# -- out -------------------------------------------------------------------------------------------


def capture(subject: Subject, rank: int) -> Captured:
    """All of it, as it is now. Raises StateError, naming it, for what cannot be saved."""
    subject.check_idle()
    found, buffers = capture_learnt(subject, rank)
    own: dict[str, Any] = {"random": capture_randomness()}
    if subject.model is not None:
        own["buffers"] = buffers
    names, own_names = subject.param_names(), subject.own_names()
    states = {label: own_states(one, names, own_names) for label, one in subject.optimizers.items()}
    if any(states.values()):
        own[STATES] = states
    if subject.has_unused_gradients():
        own["gradients"] = {name: param.grad for param, name in names.items() if param.grad is not None}
    own.update(_training_of(subject))
    own.update({name: part.state_dict() for name, part in subject.parts.items()})
    if subject.extra:
        own["extra"] = {name: state_of(value) for name, value in subject.extra.items()}
    for name, value in own.items():
        found.texts[name], leaves = encode(value, name)
        found.own += [whole_piece(f"rank-{rank}/{name}/{path}", leaf) for path, leaf in leaves.items()]
    return found


def capture_learnt(subject: Subject, rank: int) -> tuple[Captured, dict[str, Any]]:
    """Model and optimizers; and what of the model's state is this rank's own, by name."""
    found = Captured()
    buffers = {} if subject.model is None else _capture_model(subject, found, rank == 0)
    names, own_names = subject.param_names(), subject.own_names()
    for label, optimizer in subject.optimizers.items():
        capture_optimizer(label, optimizer, names, found, rank == 0, own_names)
    return found, buffers


def state_of(value: Any) -> Any:
    """The state of something extra: its own, a generator's, or the value itself."""
    if _is_stateful(value):
        return value.state_dict()
    state = generator_state(value)
    return value if state is None else state


def _capture_model(subject: Subject, found: Captured, tells: bool) -> dict[str, Any]:
    """Adds the model; returns what of its state is this rank's own."""
    assert subject.model is not None, "there is a model to capture"
    state, own_names = subject.model.state_dict(), subject.own_names()
    alike = {name.replace(_COMPILED, "") for name, _ in subject.model.named_parameters(remove_duplicate=False)} - own_names
    own: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, key in subject.model_keys().items():
        value = state[key]
        if not isinstance(value, torch.Tensor):
            extra[name] = value
            if name in own_names:
                own[name] = value
            continue
        # One memory under two names is one parameter, used twice.
        place = place_of(value)
        if value.numel() and seen.setdefault(place, name) != name:
            aliases[name] = seen[place]
            continue
        if name in alike:
            found.alike.append(whole_piece(f"model/{name}", value))
        elif tells:
            # Running statistics are rank 0's: between two forwards the others have their own, which the next one replaces.
            found.own.append(whole_piece(f"model/{name}", value))
        if name in own_names:
            own[name] = value
    tree, leaves = encode(extra, "the model's extra state")
    if tells:
        # As the text beside it, rank 0's: nobody makes ranks' extra states alike, and half of each would be nobody's.
        found.own += [whole_piece(f"model_extra/{path}", leaf) for path, leaf in leaves.items()]
    found.texts["model"] = {"aliases": aliases, "extra": tree}
    return own


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one memory, read alike. A conjugate is the same memory, read otherwise."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _training_of(subject: Subject) -> dict[str, Any]:
    """What our wrapper has learnt: the plan and its order, and what its hook keeps between steps."""
    ddp = subject.ddp
    if ddp is None:
        return {}
    found: dict[str, Any] = {}
    if ddp.reducer.settled and ddp.reducer.choose_buckets is None:
        found["plan"] = {"plan": ddp.plan.to_json(), "memory": asdict(ddp.reducer.learnt.memory)}
    state = None if ddp._hook is None else ddp._hook[0]
    if isinstance(state, HookState):
        found["hook"] = state.live_state_dict()
    elif _is_stateful(state):
        found["hook"] = state.state_dict()  # type: ignore[attr-defined]
    elif state is not None and not isinstance(state, torch.distributed.ProcessGroup):
        warnings.warn(
            f"the communication hook's state, a {type(state).__name__}, has no state_dict() and is not saved.", stacklevel=4
        )
    return found


# -- what a Checkpointer is given ------------------------------------------------------------------


def folder_of(folder: Any) -> str:
    """A folder as text. None or a number would be a folder of that name."""
    # Paths to remote storages are no files of the system's, but can be joined as others.
    if not isinstance(folder, (str, os.PathLike)) and not hasattr(folder, "joinpath"):
        raise ArgumentTypeError(f"folder must be a path or an address for fsspec, got {folder!r:.80}.")
    text = os.fsdecode(folder) if isinstance(folder, os.PathLike) else str(folder)
    if not text or "\0" in text:
        raise ConfigError(f"folder must be a path or an address for fsspec, got {text!r}.")
    return text


def check_parts(extra: Any, storage_options: Any, group: Any) -> None:
    """Refuse what cannot be looked up by name, and a group that is none."""
    for name, given in (("extra", extra), ("storage_options", storage_options)):
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            raise ArgumentTypeError(f"{name} must be a dict with names for keys, got {given!r:.80}.")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(f"process_group must be a process group this rank belongs to, got {group!r:.80}.")


def check_seconds(**limits: Any) -> None:
    """Refuse time limits that are none. Infinite ones would be no limits, and a rank that is gone be waited for."""
    for name, given in limits.items():
        if isinstance(given, bool) or not isinstance(given, Real):
            raise ArgumentTypeError(f"{name} must be a number of seconds, got {given!r:.80}.")
        if not 0 < float(given) < math.inf:
            raise ConfigError(f"{name} must be a number of seconds above 0, got {given}.")


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Numbers by name, as they are saved."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentTypeError(f"metrics must be a dict of numbers by name, got {metrics!r:.80}.")
    found = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"metrics must be a dict of numbers by name, but has the key {name!r:.80}.")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"metrics must be numbers, but '{name}' is {value!r}.") from error
    return found
