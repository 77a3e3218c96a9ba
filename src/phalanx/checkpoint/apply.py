"""Putting a saved state into a model, its optimizers and the rest. Everything is checked before anything is changed.

`Restoration` is made on every rank from the same source; making it raises what does not fit. `run` then changes the
training run. Must not know where the source comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from numbers import Integral
from typing import Any

import torch

from ..ddp.passes.settling import PlanMemory
from ..errors import ArgumentTypeError, PlanError, StateError
from ..plan import BucketPlan
from ..plan.params import gradient_dtype
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.partition.element import ElementPartition
from .capture import STATES, Subject, place_of
from .optimizers import OptimizerLoad
from .randomness import check_generator_state, check_randomness, seed_like, set_generator_state, set_randomness
from .reshard import renamed
from .source import Source

Rename = Mapping[str, str] | Callable[[str], str] | None

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"


@dataclass(frozen=True)
class Choice:
    """What of a checkpoint is wanted. `parts` None is all; `skip` are patterns of parameter names, after renaming."""

    parts: Sequence[str] | None = None
    skip: Sequence[str] = ()
    rename: Rename = None
    strict: bool = True

    @classmethod
    def of(cls, parts: str | Sequence[str] | None, skip: str | Sequence[str], rename: Rename, strict: bool) -> Choice:
        """From what a call was given. One string is one name: as a sequence, the "*" of "head.*" would skip everything."""
        chosen = [parts] if isinstance(parts, str) else parts
        return cls(chosen, [skip] if isinstance(skip, str) else skip, rename, strict)

    def in_words(self) -> str:
        """What was asked for beside the default, as it would be written in a call; empty if nothing was."""
        rename = sorted(self.rename.items()) if isinstance(self.rename, Mapping) else "a function"
        chosen = {
            "parts": None if self.parts is None else sorted(self.parts),
            "skip": sorted(self.skip) or None,
            "rename": None if self.rename is None else rename,
            "strict": None if self.strict else False,
        }
        return "".join(f", {name}={value}" for name, value in chosen.items() if value is not None)

    def wants(self, part: str) -> bool:
        return self.parts is None or part in self.parts

    def skips(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.skip)

    def new_name(self, name: str) -> str:
        if self.rename is None:
            return name
        return renamed(name, dict(self.rename)) if isinstance(self.rename, Mapping) else self.rename(name)

    def without_effect(self, saved: Collection[str], here: Collection[str]) -> Iterator[str]:
        """What was asked for and fits no name: most likely it was spelled otherwise. `here` are the model's names."""
        for old in self.rename if isinstance(self.rename, Mapping) else ():
            if not any(name == old or name.startswith(f"{old}.") for name in saved):
                yield f"rename {old!r}: nothing was saved under this name"
        known = {*here, *map(self.new_name, saved)}
        for pattern in self.skip:
            if not any(fnmatch(name, pattern) for name in known):
                yield f"skip {pattern!r}: no parameter has such a name"


@dataclass
class Restored:
    """What `restore` did. `left_out` names all that was saved and not loaded, or wanted and not there, and why."""

    step: int
    path: str
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Of `extra`: what was given as a plain value, which cannot be changed in place."""

    def __str__(self) -> str:
        rest = "".join(f"\n  left out: {line}" for line in self.left_out)
        return f"step {self.step} from {self.path}{rest}"


class Restoration:
    """One source on its way into one training run, on one rank."""

    def __init__(self, subject: Subject, source: Source, choice: Choice, rank: int, world: int) -> None:
        self._subject, self.source, self._choice = subject, source, choice
        self._rank, self._same_world = rank, world == source.world
        self.result = Restored(int(source.about.get("step", 0)), source.where, dict(source.about.get("metrics", {})))
        known = {MODEL, OPTIMIZER, RANDOM, "hook", "plan", "gradients", "extra", *subject.parts}
        unknown = set(choice.parts or ()) - known
        if unknown:
            raise StateError(f"parts may be {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}.")
        self._model: dict[str, str] = {}
        self._own_state: dict[str, Any] = {}  # what this rank had saved of the model for itself, by saved names
        self._extra: dict[str, Any] = {}
        if subject.model is not None and choice.wants(MODEL):
            own = source.own("buffers", rank if self._same_world else 0) or {}
            self._own_state = own if self._same_world else {}
            self._model = self._match_model()
            for name in () if self._same_world else sorted(own):
                self._leave(f"model '{name}'", "each rank had its own; every rank has loaded rank 0's")
        self._optimizers: list[OptimizerLoad] = []
        if choice.wants(OPTIMIZER):
            self._match_optimizers()
        self._states: dict[str, Any] = {}  # of what has states of its own, by component
        self._check_parts()

    def _leave(self, what: str, why: str) -> None:
        self.result.left_out.append(f"{what}: {why}")

    # -- checks --------------------------------------------------------------------------------

    def _match_model(self) -> dict[str, str]:
        """The key in the source for every tensor of the model that is loaded."""
        source, choice = self.source, self._choice
        saved = self._renamed(source.model_names())
        state = self._subject.model.state_dict(keep_vars=True)  # type: ignore[union-attr]
        keys = self._subject.model_keys()
        extra = self._subject.extra_names()
        wanted = {name: state[key] for name, key in keys.items() if name not in extra}
        chosen: dict[str, str] = {}
        wrong: list[str] = []
        for name, tensor in wanted.items():
            if choice.skips(name):
                self._leave(f"model '{name}'", "skipped")
            elif name not in saved and _twin(name, wanted) in saved:
                continue  # one memory under two names, of which files of safetensors have the first
            elif name not in saved:
                wrong.append(f"'{name}' is not in the checkpoint")
            elif source.infos[saved[name]].shape != tuple(tensor.shape):
                shape = source.infos[saved[name]].shape
                wrong.append(f"'{name}' has shape {tuple(tensor.shape)}, saved was {shape}")
            else:
                chosen[name] = saved[name]
        for name in saved.keys() - keys.keys():
            if choice.skips(name):
                self._leave(f"model '{name}'", "skipped")
            else:
                wrong.append(f"'{name}' was saved, and the model has no such tensor")
        here = {name: state[keys[name]] for name in extra}
        self._extra = self._match_extra(here, {name: saved[name] for name in extra & saved.keys()}, wrong)
        if wrong and choice.strict:
            shown = "; ".join(sorted(wrong)[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise StateError(
                f"{source.where} does not fit the model: {shown}. Nothing was changed. Give rename= for layers with other "
                "names, skip= for what is to stay as it is, or strict=False."
            )
        self.result.left_out += [f"model: {line}" for line in sorted(wrong)]
        self.result.left_out += choice.without_effect(source.model_names(), keys)
        return chosen

    def _match_extra(self, here: Mapping[str, Any], tensors: Mapping[str, str], wrong: list[str]) -> dict[str, Any]:
        """The extra states that are loaded. Of any kind and shape: what they may become only their modules know."""
        choice, found = self._choice, {name: self.source.whole(key).clone() for name, key in tensors.items()}
        found |= {choice.new_name(name): value for name, value in self.source.model_extra().items()}
        for name, value in self._own_state.items():
            if choice.new_name(name) in here:
                found[choice.new_name(name)] = value
        chosen = {}
        for name in sorted({*found, *here}):
            if choice.skips(name):
                self._leave(f"model '{name}'", "skipped")
            elif name not in found and isinstance(here[name], torch.Tensor):
                wrong.append(f"'{name}' is not in the checkpoint")
            elif name not in found:
                # Files of safetensors can have none, and the models in them are whole.
                self._leave(f"model '{name}'", "not in the checkpoint")
            elif name not in here:
                self._leave(f"model '{name}'", "saved, and the model has no such state")
            else:
                chosen[name] = found[name]
        return chosen

    def _renamed(self, saved: Mapping[str, str]) -> dict[str, str]:
        """The saved keys by their new names. Two tensors under one name would leave it to chance which is loaded."""
        found: dict[str, str] = {}
        before: dict[str, str] = {}
        for name, key in saved.items():
            new = self._choice.new_name(name)
            if found.setdefault(new, key) != key and not self._choice.skips(new):
                raise StateError(
                    f"{self.source.where}: rename= makes both '{before[new]}' and '{name}' into '{new}'. Nothing was "
                    "changed. Give each a name of its own, or skip= one of them."
                )
            before.setdefault(new, name)
        return found

    def _match_optimizers(self) -> None:
        labels = self.source.labels()
        own = (self.source.own(STATES, self._rank) if self._same_world else None) or {}
        for label, optimizer in self._subject.optimizers.items():
            if label not in labels and not self._choice.strict:
                self._leave(label, "not in the checkpoint")
                continue
            names, mine = self._subject.param_names(), own.get(label, {})
            self._optimizers.append(OptimizerLoad(label, optimizer, names, self.source, self._choice, mine))
            self.result.left_out += self._optimizers[-1].left_out
        for label in labels:
            if label not in self._subject.optimizers:
                self._leave(label, "saved, but there is no such optimizer here")

    def _check_parts(self) -> None:
        """Read what is neither model nor optimizer; ask those that can say so, as our loader, whether they load it."""
        rank = self._rank if self._same_world else 0
        for name in filter(self._choice.wants, (*self._subject.parts, *(["extra"] if self._subject.extra else []))):
            self._states[name] = state = self.source.own(name, rank)
            check = getattr(self._subject.parts.get(name), "check_state_dict", None)
            if check is not None and state is not None:
                check(state)
        extra = self._states.get("extra")
        if not isinstance(extra, dict | None):
            raise StateError(f"{self.source.where}: what was saved as extra is a {type(extra).__name__}, expected a dict.")
        for name, target in self._subject.extra.items():
            if extra is not None and name in extra:
                check_generator_state(target, extra[name], f"{self.source.where}: extra '{name}'")
        self._leave_unclaimed()
        if self._choice.wants(RANDOM) and self.source.texts[0].get(RANDOM) is not None:
            check_randomness(self.source.own(RANDOM, self._rank if self._rank < self.source.world else 0))

    def _leave_unclaimed(self) -> None:
        """Say what was saved and has nobody here to load it."""
        saved = self.source.texts[self._rank if self._same_world else 0]
        claimed = {*self._subject.parts, *(["extra"] if self._subject.extra else [])}
        for name in ("scheduler", "loader", "extra"):
            if name in saved and name not in claimed and self._choice.wants(name):
                self._leave(name, "saved, but there is none here")
        if self._subject.model is None and self._choice.wants(MODEL) and self.source.model_names():
            self._leave(MODEL, "saved, but there is none here")

    # -- changes -------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> Restored:
        """Load everything. Every rank calls it, after every rank's checks have passed."""
        if self._choice.parts is None or self._choice.wants("plan"):
            # First: the state is divided by the plan, and would otherwise move once more.
            self._resume_plan()
        if self._model:
            self._load_model()
        for load in self._optimizers:
            load.run()
        for name, part in self._subject.parts.items():
            state = self._own(name)
            if state is not None:
                part.load_state_dict(state)
        self._load_extra()
        self._load_hook()
        self._load_gradients()
        # Last: whatever is loaded above may draw numbers.
        self._set_randomness()
        return self.result

    def finish(self) -> None:
        """After every rank has run: parameters that ranks share have been written by all of them, alike."""
        for one in self._subject.optimizers.values():
            partition = one.sharded.partition if isinstance(one, ZeroRedundancyOptimizer) else None
            if self._model and isinstance(partition, ElementPartition):
                for shard in partition.shards:
                    shard.accept_writes()

    def _load_model(self) -> None:
        assert self._subject.model is not None, "there is a model to load"
        keys = self._subject.model_keys()
        # Views of the file: torch copies them into the model's own memory, tensor by tensor.
        state = {keys[name]: value for name, value in self._extra.items()}
        for name, key in self._model.items():
            own = self._own_state.get(key.removeprefix("model/"))
            state[keys[name]] = self.source.whole(key) if own is None else own
        self._subject.model.load_state_dict(state, strict=False)

    def _own(self, component: str) -> Any:
        """What this rank saved for itself. On another number of ranks, what rank 0 did."""
        if not self._choice.wants(component):
            return None
        found = self._states.get(component)
        if found is not None and not self._same_world:
            ranks = "one rank" if self.source.world == 1 else f"{self.source.world} ranks"
            self._leave(component, f"saved by {ranks}; every rank has loaded rank 0's")
        if found is None:
            self._leave(component, "not in the checkpoint")
        return found

    def _load_extra(self) -> None:
        saved = self._own("extra") if self._subject.extra else None
        for name, target in self._subject.extra.items():
            if saved is None or name not in saved:
                if saved is not None:
                    self._leave(f"extra '{name}'", "not in the checkpoint")
            elif hasattr(target, "load_state_dict"):
                target.load_state_dict(saved[name])
            elif hasattr(target, "set_state") or hasattr(target, "setstate") or hasattr(target, "bit_generator"):
                set_generator_state(target, saved[name])
            else:
                self.result.values[name] = saved[name]
        for name in sorted((saved or {}).keys() - self._subject.extra.keys()):
            self._leave(f"extra '{name}'", "saved, but there is none here")

    def _resume_plan(self) -> None:
        ddp = self._subject.ddp
        if ddp is None or ddp.reducer.choose_buckets is not None or self.source.texts[0].get("plan") is None:
            return
        if not self._same_world or self._choice.rename is not None:
            self._leave("plan", "of another number of ranks or other names; it is learnt anew in the first step")
            return
        saved = self.source.own("plan", self._rank)
        try:
            plan = BucketPlan.from_json(saved["plan"])
        except PlanError as error:
            raise StateError(f"{self.source.where}: {error}") from error
        if plan.specs != ddp.plan.specs:
            self._leave("plan", "it is for other parameters; it is learnt anew in the first step")
            return
        ddp.reducer.resume(plan, PlanMemory(**saved["memory"]))

    def _load_hook(self) -> None:
        ddp = self._subject.ddp
        state = None if ddp is None or ddp._hook is None else ddp._hook[0]
        saved = [self.source.own("hook", rank) for rank in range(self.source.world)] if self._choice.wants("hook") else []
        if not hasattr(state, "load_state_dict"):
            if saved and saved[0] is not None:
                self._leave("hook", "saved, but no hook with a state is registered")
            return
        if not saved or saved[0] is None:
            self._leave("hook", "not in the checkpoint")
            return
        mine = saved[self._rank] if self._same_world else _mean_residuals(saved)
        for kind, by_name in mine.items():
            if isinstance(by_name, dict):
                mine[kind] = {self._choice.new_name(name): value for name, value in by_name.items()}
        state.load_state_dict(mine)

    def _load_gradients(self) -> None:
        names = {name: param for param, name in self._subject.param_names().items()}
        saved = self.source.own("gradients", self._rank) if self._same_world and self._choice.wants("gradients") else None
        if not self._same_world and self.source.texts[0].get("gradients") is not None:
            self._leave("gradients", "not used by a step when they were saved, and each rank's own")
        if self._model and self._choice.wants("gradients"):
            # Those that are there belong to other values of the parameters; added to the next ones, a NaN would come back.
            for name in self._model.keys() & names.keys():
                names[name].grad = None
        for name, grad in (saved or {}).items():
            param = names.get(self._choice.new_name(name))
            if param is not None and param.shape == grad.shape:
                param.grad = torch.empty_like(param, dtype=gradient_dtype(param)).copy_(grad)

    def _set_randomness(self) -> None:
        if not self._choice.wants(RANDOM) or self.source.texts[0].get(RANDOM) is None:
            return
        if self._rank < self.source.world:
            self.result.left_out += set_randomness(self.source.own(RANDOM, self._rank))
        else:
            seed_like(self.source.own(RANDOM, 0), self._rank)
            self._leave(RANDOM, f"there was no rank {self._rank}; it is seeded from rank 0's state")


def _twin(name: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The first other name of the same memory: loading that one loads this."""
    mine = tensors[name]
    for other, tensor in tensors.items():
        if other != name and mine.numel() and place_of(tensor) == place_of(mine):
            return other
    return None


def _mean_residuals(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The hooks' states of n ranks for each of m: what is still to be sent, on average over ranks, stays the same."""
    mean = dict(saved[0])
    for name, residual in mean.get("residuals", {}).items():
        total = torch.stack([one["residuals"].get(name, torch.zeros_like(residual)) for one in saved]).mean(0)
        mean["residuals"][name] = total
    return mean


def check_choice(step: Any, parts: Any, skip: Any) -> None:
    """Refuse what `restore` could only misunderstand."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral)):
        raise ArgumentTypeError(f"step must be the number of a step, or None for the newest, got {step!r:.80}.")
    for name, given in (("parts", parts), ("skip", skip)):
        is_list = isinstance(given, Collection) and all(isinstance(one, str) for one in given)
        if not is_list and (given is not None or name == "skip"):
            raise ArgumentTypeError(f"{name} must be a name or a list of names, got {given!r:.80}.")
