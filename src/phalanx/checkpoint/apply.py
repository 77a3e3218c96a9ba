"""Putting a saved state into a model, its optimizers and the rest. Everything is checked before anything is changed.

`Restoration` is made on every rank from the same source; making it raises what does not fit. `run` then changes the
training run. Must not know where the source comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from ..ddp.reducer.settling import PlanMemory
from ..errors import PlanError, StateError
from ..plan import BucketPlan
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.partition.element import ElementPartition
from ..zero.partition.kinds import state_keys
from ..zero.state.loading import check_keys
from ..zero.state.tree import Leaf, leaves_of, rebuild
from .capture import Subject, members, named_params
from .layout import info_of_spec
from .randomness import seed_like, set_generator_state, set_randomness
from .reshard import renamed
from .source import Source
from .tree import decode

Rename = Mapping[str, str] | Callable[[str], str] | None

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"


@dataclass(frozen=True)
class Choice:
    """What of a checkpoint is wanted. `parts` None is all; `skip` are patterns of parameter names, after renaming."""

    parts: Sequence[str] | None = None
    skip: Sequence[str] = ()
    rename: Rename = None
    strict: bool = True

    def wants(self, part: str) -> bool:
        return self.parts is None or part in self.parts

    def skips(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.skip)

    def new_name(self, name: str) -> str:
        if self.rename is None:
            return name
        return renamed(name, dict(self.rename)) if isinstance(self.rename, Mapping) else self.rename(name)


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
        self._subject, self._source, self._choice = subject, source, choice
        self._rank, self._same_world = rank, world == source.world
        self.result = Restored(int(source.about.get("step", 0)), source.where, dict(source.about.get("metrics", {})))
        known = {MODEL, OPTIMIZER, RANDOM, "hook", "plan", "gradients", "extra", *subject.parts}
        unknown = set(choice.parts or ()) - known
        if unknown:
            raise StateError(f"parts may be {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}.")
        self._model: dict[str, str] = {}
        if subject.model is not None and choice.wants(MODEL):
            self._model = self._match_model()
        self._optimizers: list[_OptimizerLoad] = []
        if choice.wants(OPTIMIZER):
            self._match_optimizers()

    def _leave(self, what: str, why: str) -> None:
        self.result.left_out.append(f"{what}: {why}")

    # -- checks --------------------------------------------------------------------------------

    def _match_model(self) -> dict[str, str]:
        """The key in the source for every tensor of the model that is loaded."""
        source, choice = self._source, self._choice
        saved = {choice.new_name(name): key for name, key in source.model_names().items()}
        state = self._subject.model.state_dict(keep_vars=True)  # type: ignore[union-attr]
        keys = self._subject.model_keys()
        wanted = {name: state[key] for name, key in keys.items() if isinstance(state[key], torch.Tensor)}
        chosen: dict[str, str] = {}
        wrong: list[str] = []
        for name, tensor in wanted.items():
            if choice.skips(name):
                self._leave(f"model '{name}'", "skipped")
            elif name not in saved:
                wrong.append(f"'{name}' is not in the checkpoint")
            elif source.infos[saved[name]].shape != tuple(tensor.shape):
                shape = source.infos[saved[name]].shape
                wrong.append(f"'{name}' has shape {tuple(tensor.shape)}, saved was {shape}")
            else:
                chosen[name] = saved[name]
        for name in saved.keys() - wanted.keys():
            if choice.skips(name):
                self._leave(f"model '{name}'", "skipped")
            else:
                wrong.append(f"'{name}' was saved, and the model has no such tensor")
        if wrong and choice.strict:
            shown = "; ".join(sorted(wrong)[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise StateError(
                f"{source.where} does not fit the model: {shown}. Nothing was changed. Give rename= for layers with other "
                "names, skip= for what is to stay as it is, or strict=False."
            )
        self.result.left_out += [f"model: {line}" for line in sorted(wrong)]
        return chosen

    def _match_optimizers(self) -> None:
        labels = self._source.labels()
        for label, optimizer in self._subject.optimizers.items():
            if label not in labels and not self._choice.strict:
                self._leave(label, "not in the checkpoint")
                continue
            self._optimizers.append(_OptimizerLoad(label, optimizer, self._subject, self._source, self._choice))
            self.result.left_out += self._optimizers[-1].left_out
        for label in labels:
            if label not in self._subject.optimizers:
                self._leave(label, "saved, but there is no such optimizer here")

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
        state: dict[str, Any] = {keys[name]: self._source.whole(key) for name, key in self._model.items()}
        for name, value in self._source.model_extra().items():
            if self._choice.new_name(name) in keys:
                state[keys[self._choice.new_name(name)]] = value
        self._subject.model.load_state_dict(state, strict=False)
        own = self._source.own("buffers", self._rank) if self._same_world else None
        params = self._subject.model.state_dict(keep_vars=True)
        for name, value in (own or {}).items():
            if self._choice.new_name(name) in self._model:
                params[keys[self._choice.new_name(name)]].detach().copy_(value)

    def _own(self, component: str) -> Any:
        """What this rank saved for itself. On another number of ranks, what rank 0 did."""
        if not self._choice.wants(component):
            return None
        if self._same_world:
            found = self._source.own(component, self._rank)
        else:
            found = self._source.own(component, 0)
            if found is not None:
                self._leave(component, f"saved by {self._source.world} ranks; every rank has loaded rank 0's")
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

    def _resume_plan(self) -> None:
        ddp = self._subject.ddp
        if ddp is None or ddp.reducer.choose_buckets is not None or self._source.texts[0].get("plan") is None:
            return
        if not self._same_world or self._choice.rename is not None:
            self._leave("plan", "of another number of ranks or other names; it is learnt anew in the first step")
            return
        saved = self._source.own("plan", self._rank)
        try:
            plan = BucketPlan.from_json(saved["plan"])
        except PlanError as error:
            raise StateError(f"{self._source.where}: {error}") from error
        if plan.specs != ddp.plan.specs:
            self._leave("plan", "it is for other parameters; it is learnt anew in the first step")
            return
        ddp.reducer.resume(plan, PlanMemory(**saved["memory"]))

    def _load_hook(self) -> None:
        ddp = self._subject.ddp
        state = None if ddp is None or ddp._hook is None else ddp._hook[0]
        saved = [self._source.own("hook", rank) for rank in range(self._source.world)] if self._choice.wants("hook") else []
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
        saved = self._source.own("gradients", self._rank) if self._same_world and self._choice.wants("gradients") else None
        if not self._same_world and self._source.texts[0].get("gradients") is not None:
            self._leave("gradients", "not used by a step when they were saved, and each rank's own")
        for name, grad in (saved or {}).items():
            param = names.get(self._choice.new_name(name))
            if param is not None and param.shape == grad.shape:
                param.grad = torch.empty_like(param).copy_(grad)

    def _set_randomness(self) -> None:
        if not self._choice.wants(RANDOM) or self._source.texts[0].get(RANDOM) is None:
            return
        if self._rank < self._source.world:
            self.result.left_out += set_randomness(self._source.own(RANDOM, self._rank))
        else:
            seed_like(self._source.own(RANDOM, 0), self._rank)
            self._leave(RANDOM, f"there was no rank {self._rank}; it is seeded from rank 0's state")


def _mean_residuals(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The hooks' states of n ranks for each of m: what is still to be sent, on average over ranks, stays the same."""
    mean = dict(saved[0])
    for name, residual in mean.get("residuals", {}).items():
        total = torch.stack([one["residuals"].get(name, torch.zeros_like(residual)) for one in saved]).mean(0)
        mean["residuals"][name] = total
    return mean


class _OptimizerLoad:
    """One optimizer's state, checked and then set: of any class, whole or divided."""

    def __init__(self, label: str, optimizer: Any, subject: Subject, source: Source, choice: Choice) -> None:
        self._label, self._optimizer, self._source = label, optimizer, source
        self.left_out: list[str] = []
        told = source.optimizer(label)
        is_zero = isinstance(optimizer, ZeroRedundancyOptimizer)
        self._members = [optimizer] if is_zero else members(optimizer)
        self._groups = [group for one in self._members for group in one.param_groups]
        self._params = [param for group in self._groups for param in group["params"]]
        called = named_params(self._params, subject.param_names())
        saved = {choice.new_name(name): name for group in told["groups"] for name in group["params"]}
        # By name, or by number where the file knows no names.
        self._saved_names = [saved.get(name, saved.get(f"#{n}")) for n, name in enumerate(called)]
        self._options = self._match_groups(told, called, choice)
        self._trees: dict[int, Any] = {}
        keys = state_keys(self._class())
        for index, name in enumerate(self._saved_names):
            tree = told["states"].get(name)
            if tree is None:
                continue
            if choice.skips(called[index]):
                self.left_out.append(f"{label} '{called[index]}': skipped")
                continue
            if keys is not None:
                check_keys(set(tree.get("dict", ())), keys, f"'{called[index]}'", self._class().__name__)
            self._check_shapes(index, tree, called[index])
            self._trees[index] = tree

    def _class(self) -> type[torch.optim.Optimizer]:
        first = self._members[0]
        return first.optimizer_class if isinstance(first, ZeroRedundancyOptimizer) else type(first)

    def _match_groups(self, told: Mapping[str, Any], called: Sequence[str], choice: Choice) -> list[dict[str, Any]]:
        """The saved options for every group here: those of the group that had its first parameter that was saved."""
        source_groups = {name: group for group in told["groups"] for name in group["params"]}
        found, at = [], 0
        for number, group in enumerate(self._groups):
            names = self._saved_names[at : at + len(group["params"])]
            shown = called[at : at + len(group["params"])]
            at += len(group["params"])
            for name, new in zip(names, shown, strict=True):
                if name is None and not choice.skips(new) and choice.strict:
                    raise StateError(
                        f"{self._source.where} does not fit the {self._label}: '{new}' in group {number} is in none of its "
                        f"{len(told['groups'])} groups. Give rename=, skip= or strict=False."
                    )
                if name is None:
                    self.left_out.append(f"{self._label} '{new}': not in the checkpoint")
            first = next((name for name in names if name is not None), None)
            tree = source_groups[first]["options"] if first is not None else {}
            found.append(decode(tree, _no_leaf))
        return found

    def _check_shapes(self, index: int, tree: Any, name: str) -> None:
        for leaf in leaves_of(tree):
            info = self._source.infos.get(self._key(index, leaf))
            shape = tuple(self._params[index].shape)
            if info is None or (leaf.shape is None and info.shape != shape):
                got = "nothing" if info is None else f"shape {info.shape}"
                raise StateError(
                    f"{self._source.where}: {self._label}: '{name}' has shape {shape}, its saved state '{leaf.path}' {got}. "
                    "It is another model's."
                )

    def _key(self, index: int, leaf: Leaf) -> str:
        return f"{self._label}/{self._saved_names[index]}/{leaf.path}"

    # -- changes -------------------------------------------------------------------------------

    def run(self) -> None:
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            self._set_sharded(self._optimizer)
        else:
            self._set_plain()

    def _set_sharded(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Every rank reads its own part, from whichever files have it."""
        sharded = optimizer.sharded
        local = sharded.blank(dict(sorted(self._trees.items())))
        for index, tree in self._trees.items():
            for leaf in leaves_of(tree):
                key = self._key(index, leaf)
                info = self._source.infos[key]
                like = info_of_spec(sharded.table.specs[index], leaf.dtype) if leaf.shape is None else info
                for extent in local.extents.get((index, leaf.path), ()):
                    if extent.values.numel():
                        extent.values.copy_(self._source.ordered(key, like, extent.start, extent.stop))
        sharded.set_state(local)
        optimizer.set_options(self._options)

    def _set_plain(self) -> None:
        at = 0
        for one in self._members:
            count = sum(len(group["params"]) for group in one.param_groups)
            states = {index - at: self._rebuilt(index) for index in range(at, at + count) if index in self._trees}
            groups, number = [], 0
            for group in one.param_groups:
                # Lists of options are by group of the whole optimizer; identity finds the place.
                options = self._options[next(k for k, mine in enumerate(self._groups) if mine is group)]
                numbers = list(range(number, number + len(group["params"])))
                number += len(numbers)
                kept = {key: value for key, value in group.items() if key != "params"}
                groups.append({**kept, **options, "params": numbers})
            one.load_state_dict({"state": states, "param_groups": groups})
            self._restore_dtypes(one, states)
            at += count

    def _restore_dtypes(self, optimizer: torch.optim.Optimizer, states: Mapping[int, Any]) -> None:
        """Torch casts states to their parameter's dtype. What was kept in another is what continuing to the bit needs."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, state in states.items():
            mine = optimizer.state[params[index]]
            for key, value in state.items():
                loaded = mine.get(key)
                if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    mine[key] = value.to(loaded.device)

    def _rebuilt(self, index: int) -> Any:
        param = self._params[index]

        def leaf(leaf: Leaf) -> torch.Tensor:
            key = self._key(index, leaf)
            saved = self._source.whole(key)
            if leaf.shape is None:
                return torch.empty_like(param, dtype=leaf.dtype).copy_(saved)
            return saved.clone().to(param.device)

        return rebuild(self._trees[index], param.device, leaf)


def _no_leaf(path: str) -> torch.Tensor:
    raise StateError(f"an option of a group has a tensor at '{path}', which is never saved there.")
