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
import enum
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

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
from .refusal import stateful_of

logger = logging.getLogger("phalanx.elastic")

Passing = dict[str, Any]


def _no_tensor(path: str) -> torch.Tensor:
    raise StateError(f"an option of an optimizer's group, '{path}', is a tensor with dimensions.")


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
_NUMBERS = (int, float, complex, tuple)  # what a script may set among an optimizer's options: learning rates, betas


class Lines(enum.Enum):
    """Where the script is between an optimizer's step and the commit.

    DONE     no step since the last commit      begin -> RUNNING
    RUNNING  after a step                       end -> JUDGED; complete -> RUNNING, as if its scheduler had been stepped
    JUDGED   they have run to the end           begin -> RUNNING (of another step in the same commit)

    From each of them `forget` -> DONE: the step is committed, or never was. A commit may fail when lines were judged: they
    have run all the same, and are not run again.
    """

    DONE = enum.auto()
    RUNNING = enum.auto()
    JUDGED = enum.auto()


class AfterStep:
    """What the script does between `step()` and the commit. Nobody can make up for it, but for a scheduler's step.

    Nor can anybody undo what the script itself does to parameters that an optimizer steps, wherever it does so.
    """

    def __init__(
        self,
        scheduler: Any,
        untrained: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        generators: Sequence[Any] = (),
    ) -> None:
        self._scheduler, self._untrained, self._optimizers = scheduler, untrained, optimizers
        self._generators = generators
        self._lines = Lines.DONE
        self._noted = self._look()  # when the optimizer's step had ended
        # Of trained parameters, when only step() was to change them again; with their norms if looked at closely.
        self._changes: tuple[int, list[float] | None] | None = None
        self.follows: bool | None = None
        """Whether the scheduler was stepped after the optimizer in the step before; None if there was none."""
        # ReduceLROnPlateau wants a number that only the script has; of other classes it is not known what their steps want.
        known = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        self._can_follow = scheduler is None or known
        self.is_needed = scheduler is not None and not hasattr(scheduler, "last_epoch")
        """Whether a step that was cut short there cannot be completed without the script."""

    def rest(self, closely: bool = False) -> None:
        """From here on only an optimizer's step is to change trained parameters. `closely`: what is done to `param.data`
        counts no version, so that values are looked at, until the next rest but that of a step."""
        self._changes = self._count_changes(), self._norms() if closely else None

    def check(self) -> None:
        """An optimizer's step begins, or a commit: has anything else changed them?"""
        if self._changes is not None and not self.is_needed:
            count, norms = self._changes
            self.is_needed = count != self._count_changes() or (norms is not None and norms != self._norms())

    def begin(self) -> None:
        """The optimizer's step has ended."""
        self._lines, self._noted = Lines.RUNNING, self._look()
        self.rest(closely=self._changes is not None and self._changes[1] is not None)

    def end(self) -> None:
        """So have the lines of the script that belong to it."""
        self.check()
        if self._lines is not Lines.RUNNING:
            return  # no step since, and nothing is learnt of what follows one
        (scheduled, *before), (now, *after), self._lines = self._noted, self._look(), Lines.JUDGED
        followed, self.follows = self.follows, now != scheduled
        # What a scheduler does to options is known by its step. One that is stepped now and then cannot be foreseen.
        if self.follows:
            before[1], after[1] = _not_scheduled(before[1]), _not_scheduled(after[1])
        is_irregular = (followed is not None and followed != self.follows) or (self.follows and not self._is_on_schedule())
        self.is_needed = self.is_needed or before != after or is_irregular or (self.follows and not self._can_follow)

    @property
    def has_moved(self) -> bool:
        """Whether the scheduler was stepped since the optimizer's step, by lines that belong to it."""
        if self._lines is Lines.JUDGED:
            return bool(self.follows)
        return self._lines is Lines.RUNNING and self._noted[0] != self._look()[0]

    def complete(self, is_due: bool) -> None:
        """Those lines may not have run: do what is known of them. `is_due`: the scheduler of some rank was stepped."""
        if self._lines is Lines.JUDGED:
            return
        if (is_due or self.follows) and self._can_follow and not self.has_moved:
            self._lines, self._noted = Lines.RUNNING, self._look()
            self._scheduler.step()

    def forget(self) -> None:
        """The step never was, or is committed."""
        self._lines = Lines.DONE

    def _look(self) -> tuple[Any, list[Any], list[Any]]:
        marks = [*map(mark_of, self._untrained), *map(_numbers_ahead, self._generators)]
        groups = [group for one in self._optimizers for group in one.param_groups]
        options = [option for group in groups for option in group.items() if isinstance(option[1], _NUMBERS)]
        return getattr(self._scheduler, "last_epoch", None), marks, options

    def _is_on_schedule(self) -> bool:
        """Whether the learning rates are those that the scheduler set: a script may change them beside it."""
        if not hasattr(self._scheduler, "get_last_lr"):
            return True
        rates = [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]
        return rates == [float(rate) for rate in self._scheduler.get_last_lr()]

    def _trained(self) -> Iterator[torch.Tensor]:
        groups = (group for one in self._optimizers for group in one.param_groups)
        return (param for group in groups for param in group["params"])

    def _count_changes(self) -> int:
        return sum(param._version for param in self._trained())

    def _norms(self) -> list[float]:
        # Sums of absolute values: clipping makes them smaller. On a device the host would have to wait for them.
        params = [param.detach() for param in self._trained() if param.device.type == "cpu"]
        return [float(one) for one in torch._foreach_norm(params, 1)] if params else []


def _not_scheduled(options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those that no scheduler of torch changes."""
    return [option for option in options if option[0] not in ("lr", "momentum", "betas")]


def mark_of(param: torch.Tensor) -> tuple[Any, ...]:
    """Another one when a parameter has changed."""
    # What is done to `param.data` counts no version; such updates (of teachers) change every element. On a device the host
    # would have to wait for the number.
    first = param.detach().reshape(-1)[0].item() if param.numel() and param.device.type == "cpu" else None
    return param._version, param.data_ptr(), first


def _numbers_ahead(generator: Any) -> Any:
    """Another one when a generator has been drawn from."""
    state = generator_state(generator)
    # Arrays among the rest are compared by their bytes.
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


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
        generators = [value for value in subject.extra.values() if generator_state(value) is not None]
        self.has_moving_extra = len(generators) < len(subject.extra)
        """Whether something extra may be brought up to date after a step, in lines that nobody can make up for. Generators
        are kept as the random numbers of the process are; one that is drawn from in those lines is seen by `after_step`."""
        scheduler, optimizers = subject.parts.get("scheduler"), list(self._members())
        self.after_step = AfterStep(scheduler, self._untrained.params, optimizers, generators)
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
        # What no optimizer steps is among the pieces already.
        image.write(version, pieces, layout, self._with_options(texts), {**passing, "untrained": None})

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
                for state in inner.state.values():
                    yield from state.values()

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
        for label, optimizer in self.subject.optimizers.items():
            groups = [group for one in members(optimizer) for group in one.param_groups]
            for group, saved in zip(groups, source.optimizer(label)["groups"], strict=True):
                group.update(decode(saved["options"], _no_tensor))

    def read(self, source: Source, rank: int, world: int) -> None:
        """Take what was learnt: all of it from copies, the optimizer's state from states in place."""
        self._described = None
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
        """Those of a step that never was."""
        for param in self.subject.param_names():
            param.grad = None

    # -- what passes ---------------------------------------------------------------------------

    def keep(self, closely: bool = False) -> Passing:
        """What passes, as it is now. Copies. `closely`: see `AfterStep.rest`."""
        subject, hook = self.subject, self._hook_state
        self.after_step.rest(closely)
        return {
            "random": capture_randomness(),
            "buffers": [] if subject.model is None else [buffer.detach().clone() for buffer in subject.model.buffers()],
            "untrained": self._untrained.keep(),
            "hook": None if hook is None else _copy_of_hook(hook),
            "options": [_options(group) for one in self._members() for group in one.param_groups],
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
        self.put_back(own)
        self._give_options(passing["options"])
        self.after_step.forget()
        self.after_step.follows = passing["follows"]
        hook = passing["hook"] if own is None else own["hook"]
        if self._hook_state is not None and hook is not None:
            if own is None and isinstance(self._hook_state, HookState):
                hook = {**hook, "residuals": {}}  # what a rank still owes to the sum: one who has just come owes nothing
            self._hook_state.load_state_dict(hook if isinstance(self._hook_state, HookState) else copy.deepcopy(hook))

    def put_back(self, own: Passing | None) -> None:
        """Of what passes, the tensors of the model itself, as `own` has them; None for one who has read them."""
        if own is not None and self.subject.model is not None:
            for buffer, value in zip(self.subject.model.buffers(), own["buffers"], strict=True):
                buffer.detach().copy_(value)
        self._untrained.give(None if own is None else own["untrained"])

    def _give_options(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """A scheduler that goes back does not take learning rates back with it."""
        groups = [group for one in self._members() for group in one.param_groups]
        for group, options in zip(groups, kept, strict=True):
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
