"""A program's training job on one rank: model, wrapper and optimizer, and the verbs that events use.

`Wrapped` is the real thing. The reference has its own kind with the same verbs (`reference.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from tests.fuzz.member import Member, make_optimizer
from tests.fuzz.models import frozen_param, group_of, make_batch, make_model, params_of, run_models, split
from tests.fuzz.program import Call, Program


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for the bits of NaN, to which 16 bits may have come."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


class Wrapped:
    """What a user would write with phalanx."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = make_model(program.parts, program.seed)
        self.x = torch.empty(0)
        self.loss = torch.empty(0)
        self.heard: list[tuple[int, torch.Tensor]] = []
        self.broken: list[str] = []
        self._kept: list[tuple[str, torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []
        self._placed: list[tuple[torch.nn.Parameter, int]] = []
        self.parts_of = program.parts_of
        self.nets = split(self.model, self.parts_of)
        first = make_optimizer(program.for_optimizer, self.model) if program.common and program.optimizer_first else None
        self.members = [Member(program.of(number), net, program.common) for number, net in enumerate(self.nets)]
        if program.common:
            common = make_optimizer(program.for_optimizer, self.model) if first is None else first
            for member in self.members:
                member.optimizer = common

    # -- the verbs of events -------------------------------------------------------------------

    @property
    def aux(self) -> torch.Tensor | None:
        return self.nets[-1].aux

    def chosen(self, models: tuple[int, ...] | None) -> list[Member]:
        """These of the models; all of them for None."""
        return self.members if models is None else [self.members[number] for number in models]

    def trained(self, models: tuple[int, ...] | None = None) -> list[Member]:
        """One of them for each optimizer of theirs."""
        return self.chosen(models)[: self.program.num_optimizers]

    def forward(self, call: Call, data: int, sync: bool) -> Iterator[Any]:
        inputs = make_batch(data, self.rank)
        self.x = inputs[0]
        if call.inner:
            self._release_kept()
        with ExitStack() as stack:
            for member in () if sync else self.members:
                stack.enter_context(member.ddp.no_sync())
            out = run_models(call, self.nets, [member.forwards for member in self.members], self.parts_of, inputs)
        yield from ()
        return out

    def backward(
        self, loss: torch.Tensor, sync: bool, weight: float | None, retain: bool, models: tuple[int, ...] | None = None
    ) -> Iterator[Any]:
        self._release_kept()
        with ExitStack() as stack:
            for member in self.members:
                if weight is not None:
                    stack.enter_context(member.ddp.weight(weight))
                if not sync:
                    stack.enter_context(member.ddp.no_sync())
            loss.backward(retain_graph=retain)
        for param, address in self._placed:
            if param.grad is None or param.grad.data_ptr() != address:
                self.broken.append("a gradient has left the tensor that the user put it in")
                break
        yield from ()

    def ran_backward(self, sync: bool) -> Iterator[Any]:
        """The model has run a backward of its own."""
        yield from ()

    def fail(self, loss: torch.Tensor, sync: bool) -> None:
        self._release_kept()
        try:
            loss.backward()
        except ArithmeticError:
            self.heard.clear()
            return
        raise AssertionError("the backward that was to raise midway did not")

    def poison(self, loss: torch.Tensor, victim: int, part: int, value: float) -> None:
        """A backward in which rank `victim` has gradients that are not finite: its words name it, or nothing is left."""
        self._release_kept()
        hooks: list[Any] = []
        if self.rank == victim:
            param = next((p for p in self.model.parts[part].parameters() if p.requires_grad), None) if part >= 0 else None
            if param is None or self.program.mixed is not None:
                loss = loss * value
            else:
                hooks.append(param.register_hook(lambda grad: torch.full_like(grad, value)))
        said = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss.backward()
            except phalanx.errors.ReductionError as error:
                said = str(error)
        said += " ".join(str(each.message) for each in caught)
        for hook in hooks:
            hook.remove()
        if f"rank {victim}: '" not in said:
            self.broken.append(f"not said who has gradients that are not finite, but {said!r:.300}")
        if self.program.nonfinite == "skip" and any(p.grad is not None for p in self.model.parameters() if p.requires_grad):
            self.broken.append("a gradient is left of a step that was to be skipped")
        self.heard.clear()

    def zero(self, how: str, via: str, models: tuple[int, ...] | None = None) -> None:
        if how == "zeros":
            self._release_kept()
        else:
            self._placed = []
        by_optimizer = via == "optimizer" and self.program.mode != "in_backward"
        for member in self.trained(models) if by_optimizer else self.chosen(models):
            if by_optimizer:
                member.optimizer.zero_grad(set_to_none=how == "none")
            else:
                (member.ddp if via == "wrapper" else member.net).zero_grad(set_to_none=how == "none")

    def clip(self, norm: float, models: tuple[int, ...] | None = None) -> None:
        self._release_kept()
        for member in self.trained(models):
            if member.program.has_sharded_state:
                member.optimizer.clip_grad_norm_(norm)
            else:
                torch.nn.utils.clip_grad_norm_(params_of(member.optimizer), norm)

    def step(self, models: tuple[int, ...] | None = None) -> None:
        for member in self.trained(models):
            if dict(member.program.zero).get("stage") == 2:
                self._placed = []  # the step frees gradients
            if member.program.mode != "in_backward":
                member.optimizer.step()

    def step_with(self, evaluate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """A step that evaluates a closure; one optimizer alone can ask for that."""

        def closure() -> torch.Tensor:
            for _ in evaluate(self):
                raise AssertionError("an event on a rank meets nobody")
            return self.loss

        self._placed = []
        self.members[0].optimizer.step(closure)
        yield from ()

    def rate(self, factor: float) -> None:
        for member in self.trained():
            for group in member.optimizer.param_groups:
                group["lr"] *= factor

    def add_group(self, part: int, rate: float) -> None:
        member, params = self.members[0], [frozen_param()]
        if part >= 0:
            member = next(m for m, parts in zip(self.members, self.parts_of, strict=True) if part in parts)
            params = list(self.model.parts[part].parameters())
        member.optimizer.add_param_group(group_of(params, rate))

    def keep(self) -> None:
        for name, param in self.model.named_parameters():
            if type(param.grad) is torch.Tensor and param.grad.layout == torch.strided:
                self._kept.append((name, param, param.grad, param.grad.clone()))

    def _release_kept(self) -> None:
        """What is still a parameter's `.grad` is about to be added to, or zeroed, as the user asked."""
        self._kept = [entry for entry in self._kept if entry[1].grad is not entry[2]]

    def place(self, params: list[torch.nn.Parameter], held: list[torch.Tensor]) -> None:
        self._held = held  # as a user does who looks for the gradients there
        # With views or in low precision a gradient moves to the wrapper's memory, as it does with torch's class.
        if not (self.program.views or self.program.mixed or self.program.delayed):
            self._placed = [(p, p.grad.data_ptr()) for p in params if p.grad is not None and p.numel()]

    def listen(self, number: int, param: torch.nn.Parameter, scale: bool) -> None:
        heard = self.heard  # not the job: a parameter's hooks are invisible to the garbage collector

        def on_gradient(p: torch.Tensor) -> None:
            assert p.grad is not None, "the hook runs when there is a gradient"
            if scale:
                p.grad.mul_(0.5)
            heard.append((number, p.grad.detach().to_dense().clone()))

        param.register_post_accumulate_grad_hook(on_gradient)

    def reload(self, what: str) -> None:
        for member in self.members if what == "module" else self.trained():
            optimizer = member.optimizer
            if what == "module":
                member.ddp.load_state_dict(member.start)
            elif member.program.has_sharded_state:
                for rank in range(self.program.ranks):
                    optimizer.consolidate_state_dict(to=rank)
                    if rank == self.rank:
                        state = optimizer.state_dict()
                optimizer.load_state_dict(state)
            else:
                optimizer.load_state_dict(optimizer.state_dict())

    def check_kept(self) -> None:
        changed = sorted({name for name, _, grad, value in self._kept if not _is_same(grad, value)})
        if changed:
            self.broken.append(f"the kept gradient of {changed[0]} has changed")
            self._kept = []

    def whole_state(self) -> list[dict[str, Any] | None]:
        """By optimizer, its whole state on rank 0; every rank calls it."""
        return [self._state_of(member) for member in self.trained()]

    def _state_of(self, member: Member) -> dict[str, Any] | None:
        if member.program.mode == "in_backward":
            return None
        if member.program.has_sharded_state:
            member.optimizer.consolidate_state_dict(to=0)
            return member.optimizer.state_dict() if self.rank == 0 else None
        return member.optimizer.state_dict()

    # -- uneven inputs -------------------------------------------------------------------------

    def enter_join(self, stack: ExitStack, initial: bool) -> None:
        (member,) = self.members
        joined = [member.ddp, member.optimizer] if self.program.has_sharded_state else [member.ddp]
        stack.enter_context(dist.algorithms.join.Join(joined, divide_by_initial_world_size=initial))

    def turns(self, counts: tuple[int, ...]) -> int:
        return counts[self.rank % len(counts)]

    def absent(self, initial: bool) -> Iterator[Any]:
        raise AssertionError("a rank without inputs leaves the loop")

    def leave_join(self, counts: tuple[int, ...]) -> Iterator[Any]:
        yield from ()
