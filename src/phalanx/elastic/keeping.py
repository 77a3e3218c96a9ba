"""How what was learnt survives a rank, from where a worker goes on, and what is seen of a script's steps and of what it does
between a step and its commit: the words of `training` and `transaction`. Must not know what is kept, nor of groups.
"""

from __future__ import annotations

import enum
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..checkpoint.randomness import generator_state
from ..checkpoint.source import Source
from ..optim.in_backward import InBackward
from .decision import Report

Passing = dict[str, Any]
"""What passes, as of a commit (`transaction`)."""


class Keeping(enum.Enum):
    """How what was learnt survives a rank.

    WRITTEN   every rank writes its share to memory that outlives it, at each commit: the state is divided, or it is not
              known yet that a step is one step of one optimizer, so that nobody may hold it whole in the midst of
              one, or there is one rank only
    HELD      every rank holds all of it: nothing is written, and who has lost the thread takes it from another
    IN_PLACE  every rank's share is in such memory itself, and stepped there: nothing is copied, and a step that was cut
              short is finished by who is left (`place`)
    """

    WRITTEN = enum.auto()
    HELD = enum.auto()
    IN_PLACE = enum.auto()


def looks_closely_at(version: int) -> bool:
    """Whether it is looked at, until the next commit, if a script changes trained parameters through `.data`: at the first
    steps, in which those show who do so at every step, and then now and then, since it costs a reading of all of them."""
    return version < 8 or version % 32 == 0


@dataclass(frozen=True, slots=True)
class Taken:
    """From where this worker goes on: what was learnt is in `source`, or here already if that is None."""

    version: int
    keeping: Keeping
    source: Source | None
    passing: Passing
    own: Passing | None
    """What this worker itself kept of what passes; None for one who has just come."""


class Modes:
    """Which modules train and which are evaluated: a loss in the midst of an evaluation leaves them all in its mode.

    `modules` lists them; a walk over a model at every step would cost more than all else here.
    """

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._modules = modules

    def keep(self) -> list[bool]:
        """As they are now."""
        return [module.training for module in self._modules()]

    def give(self, kept: Sequence[bool]) -> None:
        """Put back what `keep` returned, here or on another rank."""
        # A model that has got other modules since has modes of its own.
        if len(found := list(self._modules())) == len(kept):
            for module, trains in zip(found, kept, strict=True):
                module.training = trains


# What a script may set among an optimizer's options: learning rates, betas.
_NUMBERS = (int, float, complex, tuple, list, torch.Tensor)


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
        generators: Sequence[Any],
        buffers: Callable[[], list[Any]],
        modes: Modes,
    ) -> None:
        self._scheduler, self._untrained, self._optimizers = scheduler, untrained, optimizers
        self._generators, self._buffers, self._modes = generators, buffers, modes
        self._trained_in: list[bool] = []  # the modes when the optimizer's step had ended
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
        self._lines, self._noted, self._trained_in = Lines.RUNNING, self._look(), self._modes.keep()
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
        if self._lines is Lines.RUNNING:
            self._modes.give(self._trained_in)
        if (is_due or self.follows) and self._can_follow and not self.has_moved:
            self._lines, self._noted = Lines.RUNNING, self._look()
            self._scheduler.step()

    def forget(self) -> None:
        """The step never was, or is committed."""
        self._lines = Lines.DONE

    def _look(self) -> tuple[Any, list[Any], list[Any]]:
        marks = [*map(mark_of, self._untrained), *map(_numbers_ahead, self._generators), *self._buffers()]
        # Emptied, or replaced. A divided one cannot be (`ZeroRedundancyOptimizer`).
        marks += [(id(one.state), len(one.state)) for one in self._optimizers if type(one.state) in (dict, defaultdict)]
        groups = [group for one in self._optimizers for group in one.param_groups]
        options = [(key, _number(value)) for group in groups for key, value in group.items() if isinstance(value, _NUMBERS)]
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


def _number(value: Any) -> Any:
    """An option's value, apart from the object that holds it, which may be changed in place."""
    if isinstance(value, torch.Tensor):
        # On a device the host would have to wait for it.
        return value.tolist() if value.device.type == "cpu" else value._version
    return tuple(value) if isinstance(value, list) else value


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


class Steps:
    """The optimizers' steps since the last commit: how many have begun, and how many have ended."""

    def __init__(self, optimizers: Iterable[Any], after_step: AfterStep, look_for_loss: Callable[[], None]) -> None:
        self.begun = self.ended = 0
        self.has_closure = False
        """Whether any step, ever, was given a closure: backward, and so a loss, comes inside of such a step."""
        self._after_step, self.look_for_loss = after_step, look_for_loss
        for one in optimizers:
            if not isinstance(one, InBackward):
                one.register_step_pre_hook(self._begins)
                one.register_step_post_hook(self._ends)

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.look_for_loss()  # before anything counts as begun: nothing has been changed
        self.begun += 1
        self.has_closure = self.has_closure or callable(args[1] if len(args) > 1 else kwargs.get("closure"))
        self._after_step.check()

    def _ends(self, *_: Any) -> None:
        self.ended += 1
        self._after_step.begin()

    def end(self) -> None:
        """The lines of the script that belong to them have ended. Raises if it has caught the loss of a rank."""
        self.look_for_loss()
        self._after_step.end()

    def report(self, version: int | None) -> Report:
        """Where this rank stands, which has committed `version`."""
        return Report(version, self.begun > 0, self.ended == self.begun, self._after_step.has_moved)

    def forget(self) -> None:
        """They are committed, or never were."""
        self.begun = self.ended = 0
        self._after_step.forget()
