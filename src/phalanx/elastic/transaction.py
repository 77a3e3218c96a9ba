"""Everything that a step changes, as one: kept when the step is done, and put back when it never was.

Two parts, since one is large and the other changes by steps that fail as well:

    learnt    parameters, optimizer state, buffers that ranks share     written to an image, a share per rank, or all of it
    passing   random numbers, buffers, parameters that no optimizer     kept by each worker for itself; one who comes takes
              steps, the hook's state, scheduler and options, position  rank 0's, and draws random numbers of its own
              in the data, extra

The layout of what was learnt is made once and kept for as long as the tensors stay the same ones. Must not know of groups.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.apply import MODEL, OPTIMIZER, Choice, Restoration
from ..checkpoint.capture import Subject, capture_learnt, state_of
from ..checkpoint.layout import Layout, Piece, lay_out
from ..checkpoint.optimizers import members, named_params, options_of
from ..checkpoint.randomness import capture_randomness, generator_state, seed_like, set_generator_state, set_randomness
from ..checkpoint.source import Source
from ..checkpoint.tree import decode
from ..comm.hooks import HookState
from ..errors import StateError
from ..launch.elastic.heads import Paths
from ..optim.in_backward import InBackward
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.state.tree import numbers_of
from .image import ImageSource, RankImage
from .keeping import AfterStep, Modes, Passing, mark_of
from .refusal import stateful_of, wrappers_of

logger = logging.getLogger("phalanx.elastic")


def _no_tensor(path: str) -> torch.Tensor:
    raise StateError(f"an option of an optimizer's group, '{path}', is a tensor with dimensions.")


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What is in nested dicts, lists and tuples. Not these themselves: compared as such, they would compare tensors."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _leaves(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _states(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, Any]]:
    """An optimizer's states, by the names of the parameters they belong to."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        sharded = optimizer.sharded
        called = named_params(sharded.table.params, names)
        pairs = [(called[owned.index], owned.key) for owned in sharded.partition.owned]
        live = sharded.optim.state
    else:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        pairs = list(zip(named_params(params, names), params, strict=True))
        live = optimizer.state
    yield from ((name, live[key]) for name, key in pairs if key in live)


_LOADER = "loader"


class Untrained:
    """The parameters that no optimizer steps: mostly frozen, but a teacher may be moved in forward.

    Copies are kept of those that were seen to change, and of no others: a frozen model may be all of the memory.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params
        self._kept: list[tuple[tuple[Any, ...], torch.Tensor | None]] = []

    def keep(self) -> list[torch.Tensor | None]:
        """Copies by parameter; None for what has never changed."""
        before = self._kept or [(mark_of(param), None) for param in self.params]
        self._kept = []
        for param, (mark, held) in zip(self.params, before, strict=True):
            now = mark_of(param)
            self._kept.append((now, held if now == mark else param.detach().clone()))
        return [held for _, held in self._kept]

    @torch.no_grad()
    def take(self, kept: Sequence[torch.Tensor | None] | None, moves: Sequence[bool]) -> None:
        """What another rank's `keep` returned, for one who comes and has read all that was there: a step that is undone had
        moved some of them by then. `moves`: those that were ever seen to change, so that copies are kept here too."""
        self._kept = []
        for number, (param, has_moved) in enumerate(zip(self.params, moves, strict=True)):
            value = None if kept is None else kept[number]
            if value is not None:
                param.detach().copy_(value)
            self._kept.append((mark_of(param), param.detach().clone() if has_moved else None))

    @torch.no_grad()
    def give(self, kept: Sequence[torch.Tensor | None] | None) -> None:
        """Put back what `keep` returned; None if all have been read from elsewhere already."""
        for number, (param, (mark, held)) in enumerate(zip(self.params, self._kept, strict=False)):
            value = None if kept is None else kept[number]
            if value is not None:
                param.detach().copy_(value)
            elif kept is not None and mark_of(param) != mark:
                logger.warning("a parameter that no optimizer steps changed for the first time in a step that is undone")
            copied = None if held is None and value is None else param.detach().clone()
            self._kept[number] = mark_of(param), copied


class Buffers:
    """A model's buffers, which change by steps that fail as well: copies by name, and marks that tell of a change.

    Modules make buffers, replace them and let them grow as they like, also in a forward that is undone. So they are
    looked up by name; the modules only when buffers are kept, since a walk over all of them costs more than all else here.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._list_modules()

    def _list_modules(self) -> None:
        named = () if self._model is None else self._model.named_modules()
        self._modules = [(f"{name}." if name else "", module) for name, module in named]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All of the model's, as of the last `keep`."""
        return [module for _, module in self._modules]

    def _all(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        for prefix, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield prefix + name, module, name, buffer

    def keep(self) -> dict[str, torch.Tensor]:
        """Copies, by name."""
        self._list_modules()
        return {full: buffer.detach().clone() for full, _, _, buffer in self._all()}

    @torch.no_grad()
    def give(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Put back what `keep` returned. What a module was given since is taken from it again.

        But for caches: a buffer that is in no state_dict and has been made, or made larger, since. It stays, as the module
        may remember its size in an attribute of its own.
        """
        for full, module, name, buffer in list(self._all()):
            is_cache = name in module._non_persistent_buffers_set
            value = kept.get(full)
            if value is None:
                if not is_cache:
                    del module._buffers[name]
            elif value.shape != buffer.shape:
                if not is_cache:
                    module._buffers[name] = value.clone()
            elif buffer.is_inference():
                module._buffers[name] = value.clone()  # made in an evaluation: it cannot be changed outside of one
            else:
                buffer.detach().copy_(value)
        for prefix, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None and prefix + name in kept:
                    module._buffers[name] = kept[prefix + name].clone()

    def marks(self) -> list[Any]:
        """Others when a buffer has changed, but for what is done to `buffer.data`. Cheap: asked twice per step."""
        return [(id(one), None if one.is_inference() else one._version) for _, _, _, one in self._all()]


class Transaction:
    """The state of one training run, on its way out and back."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._seen: list[Any] = []
        self._described: tuple[list[Piece], Layout, dict[str, Any]] | None = None
        self._place = (0, 1)
        self._are_views = True  # whether what is described shows the tensors as they are now
        # Counts of steps and the like: tensors whose values are in the texts, with where they are there.
        self._numbers: list[tuple[dict[str, Any], torch.Tensor]] = []
        groups = (group for one in self._members() for group in one.param_groups)
        stepped = {id(param) for group in groups for param in group["params"]}
        self._untrained = Untrained([param for param in subject.param_names() if id(param) not in stepped])
        self._buffers = Buffers(subject.model)
        generators = [value for value in subject.extra.values() if generator_state(value) is not None]
        self.has_moving_extra = len(generators) < len(subject.extra)
        """Whether something extra may be brought up to date after a step, in lines that nobody can make up for. Generators
        are kept as the random numbers of the process are; one that is drawn from in those lines is seen by `after_step`."""
        scheduler, optimizers = subject.parts.get("scheduler"), list(self._members())
        wrappers, untrained = wrappers_of(subject), self._untrained.params
        self._modes = Modes(lambda: [*wrappers, *self._buffers.modules])
        self.after_step = AfterStep(scheduler, untrained, optimizers, generators, self._buffers.marks, self._modes)
        modules = () if subject.model is None else subject.model.modules()
        self.has_extra_state = any(type(one).get_extra_state is not torch.nn.Module.get_extra_state for one in modules)
        """Whether modules have states that are no tensors (`get_extra_state`), which nobody sees change."""

    def _members(self) -> Iterator[torch.optim.Optimizer]:
        for optimizer in self.subject.optimizers.values():
            yield from members(optimizer)

    @property
    def is_divided(self) -> bool:
        """Whether no rank has the whole state of the optimizers, or at all times."""
        return any(isinstance(one, (ZeroRedundancyOptimizer, InBackward)) for one in self.subject.optimizers.values())

    def holds_whole(self) -> bool | None:
        """Whether divided optimizers have all of their state on this rank, which is alone in their group; None if they have
        none."""
        found = [one for one in self.subject.optimizers.values() if isinstance(one, ZeroRedundancyOptimizer)]
        return all(one.world_size == 1 for one in found) if any(one.optim.state for one in found) else None

    @property
    def has_stepped_in_backward(self) -> bool:
        """Whether the optimizers step in backward, and the one of this batch was no mere part of a sum."""
        ddp, found = self.subject.ddp, self.subject.optimizers.values()
        accumulates = ddp is not None and bool(ddp.reducer.unreduced)
        return bool(found) and all(isinstance(one, InBackward) for one in found) and not accumulates

    # -- what was learnt -----------------------------------------------------------------------

    def write(self, image: RankImage, version: int, rank: int, world: int, passing: Passing) -> None:
        """Write this rank's share of what was learnt; all of it if `world` is 1."""
        pieces, layout, texts = self._describe(rank, world)
        image.write(version, pieces, layout, self._with_options(texts), passing)

    def preserve(self, paths: Paths, version: int, passing: Passing) -> None:
        """Write all of it, as of `passing`, to one rank's files. No optimizer has stepped since."""
        self.put_back(passing)
        image = RankImage(paths, 0, 1)
        self.write(image, version, 0, 1, passing)
        image.close()

    def _describe(self, rank: int, world: int) -> tuple[list[Piece], Layout, dict[str, Any]]:
        seen = list(self._dependencies())
        same = self._place == (rank, world) and len(seen) == len(self._seen)
        # Tensors by what they are, the rest by value: a number among the states (a count of steps) is in the texts.
        same = same and all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(seen, self._seen))  # noqa: B905
        if self._described is None or not same or self.has_extra_state or not self._are_views:
            found, _ = capture_learnt(self.subject, rank)
            pieces = found.mine(rank, world)
            live = {one.untyped_storage().data_ptr() for one in seen if isinstance(one, torch.Tensor)}
            # A tensor with gaps in its memory is captured as a dense copy, which stays as it is when the tensor moves on.
            self._are_views = all(one.values.untyped_storage().data_ptr() in live for one in pieces if one.values.numel())
            self._described = pieces, lay_out(pieces), found.texts
            self._seen, self._place = seen, (rank, world)
            self._numbers = list(self._find_numbers(found.texts))
        else:
            for place, tensor in self._numbers:
                place["value"] = tensor.item()
        return self._described

    def _find_numbers(self, texts: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        names = self.subject.param_names()
        for label, optimizer in self.subject.optimizers.items():
            trees = texts.get(label, {}).get("states", {})
            for one in members(optimizer):
                for name, state in _states(one, names):
                    if name in trees:
                        yield from numbers_of(trees[name], state)

    def _dependencies(self) -> Iterator[Any]:
        """All that the description of what was learnt depends on."""
        model = self.subject.model
        if model is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                yield tensor
                yield tensor.data_ptr()
        for optimizer in self.subject.optimizers.values():
            for one in members(optimizer):
                inner = one.sharded.optim if isinstance(one, ZeroRedundancyOptimizer) else one
                yield from _leaves(inner.state.values())

    def _with_options(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        """Learning rates and the like change from step to step, and are few."""
        found, names = dict(texts), self.subject.param_names()
        for label, optimizer in self.subject.optimizers.items():
            if label in texts:
                groups = [group for one in members(optimizer) for group in one.param_groups]
                called = named_params([param for group in groups for param in group["params"]], names)
                found[label] = {**texts[label], "groups": list(options_of(groups, label, called))}
        return found

    def read_options(self, source: Source) -> None:
        """Take the options of the optimizers' groups: learning rates and the like."""
        self._drop_added(source)
        for label, optimizer in self.subject.optimizers.items():
            groups = [group for one in members(optimizer) for group in one.param_groups]
            for group, saved in zip(groups, source.optimizer(label)["groups"], strict=True):
                group.update(decode(saved["options"], _no_tensor))

    def _drop_added(self, source: Source) -> None:
        """Have as many groups as were saved."""
        for label, optimizer in self.subject.optimizers.items():
            if not isinstance(optimizer, InBackward):  # its groups are fixed, one per parameter
                _drop_groups(optimizer, len(source.optimizer(label)["groups"]))

    def read(self, source: Source, rank: int, world: int, own: Passing | None) -> None:
        """Take what was learnt: all of it from copies, the optimizer's state from states in place."""
        self._described = None
        if own is not None:
            self._buffers.give(own["buffers"])  # those that the copies have, in their shapes
        self._drop_added(source)
        parts = (MODEL, OPTIMIZER) if isinstance(source, ImageSource) else (OPTIMIZER,)
        restoration = Restoration(self.subject, source, Choice(parts=parts), rank, world)
        restoration.run()
        restoration.finish()

    @torch.no_grad()
    def read_params(self, source: Source, label: str) -> None:
        """Take the parameters of an optimizer from states in place, where each rank has those that it owns."""
        groups, names = self.subject.optimizers[label].param_groups, self.subject.param_names()
        params = [param for group in groups for param in group["params"]]
        for param, name in zip(params, named_params(params, names), strict=True):
            param.detach().copy_(source.whole(f"model/{name}"))

    def groups(self, label: str) -> list[dict[str, Any]]:
        """The options of an optimizer's groups as they are now."""
        groups = self.subject.optimizers[label].param_groups
        params = [param for group in groups for param in group["params"]]
        return list(options_of(groups, label, named_params(params, self.subject.param_names())))

    def forget_gradients(self) -> None:
        """Those of a step that never was, also of parameters that are part of something extra."""
        groups = (group for one in self._members() for group in one.param_groups)
        for param in (*self.subject.param_names(), *(param for group in groups for param in group["params"])):
            param.grad = None

    # -- what passes ---------------------------------------------------------------------------

    def keep(self, closely: bool = False) -> Passing:
        """What passes, as it is now. Copies. `closely`: see `AfterStep.rest`."""
        subject, hook, untrained = self.subject, self._hook_state, self._untrained.keep()
        self.after_step.rest(closely)
        return {
            "random": capture_randomness(),
            "buffers": self._buffers.keep(),
            "untrained": untrained,
            "moves": [one is not None for one in untrained],
            "modes": self._modes.keep(),
            "hook": None if hook is None else _copy_of_hook(hook),
            "options": [[_options(group) for group in one.param_groups] for one in self._members()],
            "follows": self.after_step.follows,
            # The loader's is made anew whenever it is asked for.
            "parts": {
                name: state if name == _LOADER else copy.deepcopy(state)
                for name, state in ((name, part.state_dict()) for name, part in subject.parts.items())
            },
            "extra": {name: copy.deepcopy(state_of(value)) for name, value in subject.extra.items()},
        }

    def give_up_pass(self) -> None:
        """A pass that failed may have left a hook in the midst of a bucket."""
        if isinstance(self._hook_state, HookState):
            self._hook_state.give_up_step()

    def give(self, passing: Passing, own: Passing | None) -> None:
        """Put it back: `own` is what this worker itself kept, None for one who has just come.

        The loader has its part already; random numbers are the caller's to set, last (`set_random`).
        """
        subject = self.subject
        for name, part in subject.parts.items():
            if name != _LOADER:
                part.load_state_dict(copy.deepcopy(passing["parts"][name]))
        for name, target in subject.extra.items():
            if hasattr(target, "load_state_dict"):
                target.load_state_dict(copy.deepcopy(passing["extra"][name]))
                if isinstance(target, torch.amp.GradScaler):
                    # No public name for it, and no part of its state: that gradients have been unscaled. A scaler that was
                    # left inside of step() would take the next ones for unscaled, or refuse to unscale them.
                    target._per_optimizer_states.clear()
            else:
                set_generator_state(target, passing["extra"][name])
        if own is not None:
            self.put_back(own)
        else:
            self._untrained.take(passing["untrained"], passing["moves"])
            # Those that are in no state_dict: nobody has read them.
            self._buffers.give(passing["buffers"])
        self._modes.give(passing["modes"])
        self._give_options(passing["options"])
        self.after_step.forget()
        self.after_step.follows = passing["follows"]
        hook = passing["hook"] if own is None else own["hook"]
        if self._hook_state is not None and hook is not None:
            if own is None and isinstance(self._hook_state, HookState):
                hook = {**hook, "residuals": {}}  # what a rank still owes to the sum: one who has just come owes nothing
            self._hook_state.load_state_dict(hook if isinstance(self._hook_state, HookState) else copy.deepcopy(hook))

    def put_back(self, own: Passing) -> None:
        """Of what passes, the tensors of the model itself, as `own` has them."""
        self._buffers.give(own["buffers"])
        self._untrained.give(own["untrained"])

    def _give_options(self, kept: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """A scheduler that goes back does not take learning rates back with it. Nor does it groups that were added since."""
        pairs: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        for one, groups in zip(self._members(), kept, strict=True):
            _drop_groups(one, len(groups))
            pairs += zip(one.param_groups, groups, strict=True)
        for group, options in pairs:
            for key, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)

    def set_random(self, passing: Passing, own: Passing | None, salt: int) -> None:
        """Random numbers as `own` had them; for one who has just come, others than anybody else's."""
        if own is not None:
            set_randomness(own["random"])
        else:
            seed_like(passing["random"], salt)

    @property
    def _hook_state(self) -> Any:
        return stateful_of(self.subject)


def trained_of(subject: Subject) -> list[bool]:
    """Which of the model's parameters get gradients."""
    return [param.requires_grad for param in subject.param_names()]


def renew(subject: Subject, trained: Sequence[bool]) -> None:
    """Put wrappers and divided optimizers together anew, over whatever group there is, with those parameters trained."""
    for param, is_trained in zip(subject.param_names(), trained, strict=False):  # of another model: wrappers say how
        if param.requires_grad != is_trained:
            param.requires_grad_(is_trained)
    sharded = [one for one in subject.optimizers.values() if isinstance(one, ZeroRedundancyOptimizer)]
    for one in sharded:
        one.let_go()
    for ddp in wrappers_of(subject):
        ddp.renew()
    for one in sharded:
        one.renew()


def _drop_groups(optimizer: torch.optim.Optimizer, num_kept: int) -> None:
    """Those that were added in a step that is undone: the script adds them again. Raises if that cannot be."""
    groups = optimizer.param_groups
    if len(groups) < num_kept or (len(groups) > num_kept and isinstance(optimizer, ZeroRedundancyOptimizer)):
        raise StateError(
            f"a {type(optimizer).__name__} has {len(groups)} groups of parameters here, and {num_kept} where it is to go on "
            "from. In an elastic run add all groups before the training function is called, with a learning rate of 0 if "
            "need be: who comes calls it from its beginning, and has the groups of the first lines."
        )
    for param in (param for group in groups[num_kept:] for param in group["params"]):
        optimizer.state.pop(param, None)
    del groups[num_kept:]


def _copy_of_hook(hook: Any) -> Any:
    # Ours are copies already.
    return hook.state_dict() if isinstance(hook, HookState) else copy.deepcopy(hook.state_dict())


_PLAIN = (int, float, bool, str, type(None))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # Nearly all are numbers, of which `deepcopy` asks a dozen questions.
        key: value if type(value) in _PLAIN else copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
