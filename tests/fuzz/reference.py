"""The same program in one process: every rank's model side by side, and the mean of their gradients by hand.

Events run rank by rank; where ranks have to meet, an event yields a `Meeting` and goes on when all ranks are there. Nothing
of phalanx is used here, and nothing of torch.distributed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.models import (
    SparseWords,
    frozen_param,
    given_params,
    group_of,
    make_batch,
    make_model,
    params_of,
    run_models,
    split,
)
from tests.fuzz.program import Call, Program


@dataclass(frozen=True)
class Mean:
    """Ranks average their gradients of these models; an `absent` rank takes part with nothing to give."""

    weight: float | None = None
    absent: bool = False
    models: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CopyBuffers:
    """Every rank takes rank 0's buffers of one model."""

    model: int


@dataclass(frozen=True)
class StepTogether:
    """One optimizer steps for all ranks: its closure is evaluated on each of them."""

    evaluate: Callable[[Any], Iterator[Any]]


@dataclass(frozen=True)
class CopyParameters:
    """Every rank takes the parameters of rank `source`."""

    source: int


class Alone:
    """One rank of the reference. The verbs are those of `job.Wrapped`."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = make_model(program.parts, program.seed)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.params = list(self.model.parameters())
        self.x = torch.empty(0)
        self.loss = torch.empty(0)
        self.aux: torch.Tensor | None = None
        self.heard: list[tuple[int, torch.Tensor]] = []
        self.broken: list[str] = []
        # Whether the parameter got gradient since the last mean, also in backwards that were not reduced.
        self.fired = [False] * len(self.params)
        # How many times larger the ranks' gradients were than their mean, in which what was rounded weighs that much more.
        self.cancelled = [1.0] * len(self.params)
        # How far steps have moved the parameter, later ones weighing more: a moving mean may cancel out the next gradient.
        self.moved = [0.0] * len(self.params)
        # The largest gradient of any rank so far, of which the optimizer's state may hold a small remainder.
        self.largest = [0.0] * len(self.params)
        self._low: list[Any] = []
        self.parts_of = program.parts_of
        self.nets = split(self.model, self.parts_of)
        self.programs = [program.of(number) for number in range(len(self.nets))]
        self._copies_buffers = [True] * len(self.nets)
        name, options = program.optimizer_options
        kind = getattr(torch.optim, name)
        given = [given_params(*one) for one in zip(self.programs, self.nets, strict=True)]
        if program.common:
            given = [given_params(program.for_optimizer, self.model)]
        self.optimizers = [kind(params, **options) for params in given]
        numbers = {id(param): number for number, param in enumerate(self.params)}
        self.numbers_of = [sorted({numbers[id(p)] for p in net.parameters()}) for net in self.nets]
        sparse = [p for part in self.model.modules() if isinstance(part, SparseWords) for p in part.parameters()]
        # What a backward that failed may have left as zeros.
        self.doubtful: set[int] = set()
        self.is_sparse = [any(p is q for q in sparse) for p in self.params]
        for number, param in enumerate(self.params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, number=number: self._mark(number))

    def _mark(self, number: int) -> None:
        self.fired[number] = True

    def forward(self, call: Call, data: int, sync: bool) -> Iterator[Any]:
        if torch.is_grad_enabled():
            for number in self.chosen(call.models):
                if self._copies_buffers[number] and any(True for _ in self.nets[number].buffers()):
                    yield CopyBuffers(number)
                self._copies_buffers[number] = sync
        self.x, tokens = make_batch(data, self.rank)
        nets = self.nets if self.program.mixed is None else [self._make_low()]
        dtype = self._low_dtype
        inputs = (self.x if dtype is None else self.x.to(dtype), tokens)
        out = run_models(call, nets, nets, self.parts_of, inputs)
        self.aux = nets[-1].aux
        if nets is not self.nets:
            for full, low in zip(self.model.buffers(), nets[0].buffers(), strict=True):
                full.copy_(low)
        return out

    def chosen(self, models: tuple[int, ...] | None) -> Sequence[int]:
        """These of the models; all of them for None."""
        return range(len(self.nets)) if models is None else models

    def trained(self, models: tuple[int, ...] | None = None) -> Sequence[int]:
        """The optimizers of these models: as many as there are models, or one."""
        return self.chosen(models)[: len(self.optimizers)]

    @property
    def _low_dtype(self) -> torch.dtype | None:
        name = None if self.program.mixed is None else self.program.mixed[0]
        return None if name is None else getattr(torch, name)

    def _make_low(self) -> Any:
        """Mixed precision: forward and backward on a copy; its gradients are harvested into the whole parameters."""
        low = copy.deepcopy(self.model)
        low.train(self.model.training)
        if self._low_dtype is not None:
            low.to(self._low_dtype)
        for number, param in enumerate(low.parameters()):
            param.grad = None
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, number=number: self._mark(number))
        self._low.append(low)
        return low

    def backward(
        self, loss: torch.Tensor, sync: bool, weight: float | None, retain: bool, models: tuple[int, ...] | None = None
    ) -> Iterator[Any]:
        loss.backward(retain_graph=retain)
        self._harvest()
        # No gradient of a model begins a reduction of it where all of its parameters are frozen.
        trained = tuple(n for n in self.chosen(models) if any(p.requires_grad for p in self.nets[n].parameters()))
        if sync and trained:
            yield Mean(weight, models=trained)
            self._reduced(trained)

    def ran_backward(self, sync: bool) -> Iterator[Any]:
        self._harvest()
        if sync:
            yield Mean()
            self._reduced()

    def _harvest(self) -> None:
        for low in self._low:
            for full, param in zip(self.params, low.parameters(), strict=True):
                if param.grad is not None:
                    grad = param.grad.to(full.dtype)
                    full.grad = grad if full.grad is None else full.grad + grad
                    param.grad = None

    def _reduced(self, models: tuple[int, ...] | None = None) -> None:
        for number in self.chosen(models):
            if self.programs[number].steps_in_backward:
                self.optimizers[number].step()
                if self.programs[number].mode == "in_backward" or self._frees_gradients(number):
                    self.optimizers[number].zero_grad()

    def _frees_gradients(self, model: int) -> bool:
        """Whether a step leaves no gradient. Scattered ones, used in backward, are freed too, but may still be zeroed."""
        program, zero = self.programs[model], dict(self.programs[model].zero)
        by_element = zero.get("partition") != "parameter" and program.mixed is None and program.hook is None
        is_scattered = program.mode == "overlapped" and by_element and program.ranks > 1
        return zero.get("stage") == 2 and not is_scattered

    def fail(self, loss: torch.Tensor, sync: bool) -> None:
        """A backward that raises leaves no gradient behind; what it recomputed may have changed buffers.

        Unless nobody was to reduce it: then what has come stays, as without a wrapper.
        """
        if not sync:
            with contextlib.suppress(ArithmeticError):
                loss.backward()
            self._harvest()
            self.heard.clear()
            return
        held = [None if p.grad is None else p.grad.clone() for p in self.params]
        fired, self.fired = list(self.fired), [False] * len(self.fired)
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        self.doubtful |= {number for number, has_come in enumerate(self.fired) if has_come}
        self.fired = fired
        self.heard.clear()
        for param, grad in zip(self.params, held, strict=True):
            param.grad = grad
        for low in self._low:
            low.zero_grad()

    def poison(self, loss: torch.Tensor, victim: int, part: int, value: float) -> None:
        """Nothing is kept of such a backward. (What it recomputed may have changed buffers.)"""
        loss.backward()
        for low in self._low:
            low.zero_grad()
        self.zero("none", "module")
        self.fired = [False] * len(self.fired)
        self.heard.clear()

    def zero(self, how: str, via: str, models: tuple[int, ...] | None = None) -> None:
        by_optimizer = via == "optimizer" and self.program.mode != "in_backward"
        for number in self.trained(models) if by_optimizer else self.chosen(models):
            (self.optimizers if by_optimizer else self.nets)[number].zero_grad(set_to_none=how == "none")
        for number in self.chosen(models):
            if how == "none":
                self.doubtful -= {n for n in self.numbers_of[number] if self.params[n].grad is None}

    @property
    def is_in_doubt(self) -> bool:
        """Whether some gradient is none here and may as well be zeros, which make a step by decay and momentum."""
        return any(self.params[number].grad is None for number in self.doubtful)

    def clip(self, norm: float, models: tuple[int, ...] | None = None) -> None:
        for number in self.trained(models):
            torch.nn.utils.clip_grad_norm_(params_of(self.optimizers[number]), norm)

    def step(self, models: tuple[int, ...] | None = None) -> None:
        for number in self.trained(models):
            if not self.programs[number].steps_in_backward:
                self.optimizers[number].step()
                self._stepped(number)

    def _stepped(self, model: int) -> None:
        if self._frees_gradients(model):
            self.optimizers[model].zero_grad()

    def step_with(self, evaluate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        if self.program.steps_in_backward:
            yield from evaluate(self)
        else:
            yield StepTogether(evaluate)
            self._stepped(0)

    def rate(self, factor: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def add_group(self, part: int, rate: float) -> None:
        optimizer, params = self.optimizers[0], [frozen_param()]
        if part >= 0:
            owner = next(number for number, parts in enumerate(self.parts_of) if part in parts)
            optimizer = self.optimizers[0 if self.program.common else owner]
            params = list(self.model.parts[part].parameters())
        optimizer.add_param_group(group_of(params, rate))

    def keep(self) -> None:
        """Only the real wrapper could change what is kept."""

    def place(self, params: list[torch.nn.Parameter], held: list[torch.Tensor]) -> None:
        """Only the real wrapper could move what is placed."""

    def listen(self, number: int, param: torch.nn.Parameter, scale: bool) -> None:
        def on_gradient(p: torch.Tensor) -> None:
            assert p.grad is not None, "the hook runs when there is a gradient"
            if scale:
                p.grad.mul_(0.5)
            self.heard.append((number, p.grad.detach().to_dense().clone()))

        param.register_post_accumulate_grad_hook(on_gradient)

    def reload(self, what: str) -> None:
        if what == "module":
            self.model.load_state_dict(self.start)
        else:
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    def enter_join(self, stack: ExitStack, initial: bool) -> None:
        """Ranks without inputs are accounted for in `absent`."""

    def turns(self, counts: tuple[int, ...]) -> int:
        return max(counts[rank % len(counts)] for rank in range(self.program.ranks))

    def absent(self, initial: bool) -> Iterator[Any]:
        # What this rank still holds belongs to its last step, and nobody may use it again.
        self.zero("none", "module")
        yield Mean(1.0 if initial else 0.0, absent=True)
        if self.program.has_sharded_state:
            self._reduced()
            self.step()

    def leave_join(self, counts: tuple[int, ...]) -> Iterator[Any]:
        most = self.turns(counts)
        last = max(rank for rank in range(self.program.ranks) if counts[rank % len(counts)] == most)
        yield CopyParameters(last)
