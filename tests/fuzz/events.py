"""What may happen in a program. Each event is a value with a `run`, the same for the ranks and for the reference.

`run` is a generator: in the reference it stops wherever ranks have to meet (`reference.py`); on the ranks it never does.
What a job is: `job.py`. First the ways to a gradient, then everything that happens around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.program import Call, Route, Value

Run = Iterator[Any]
EVERY_RANK = -1


def loss_of(out: Any) -> torch.Tensor:
    """A loss of whatever the model returned."""
    if isinstance(out, torch.distributions.Distribution):
        return -out.log_prob(torch.ones(())).float().sum()
    return out.to(torch.promote_types(out.dtype, torch.float32)).square().sum()


@dataclass(frozen=True, repr=False)
class Pass(Value):
    """One forward and its backward. `routes` has one route for all ranks, or one per rank; so has `weights`."""

    data: int
    routes: tuple[Route, ...]
    sync: bool = True
    weights: tuple[float, ...] | None = None

    def route(self, job: Any) -> Route:
        return self.routes[job.rank % len(self.routes)]

    def out(self, job: Any, data: int | None = None, **how: Any) -> Any:
        call = Call(self.route(job), **how)
        return (yield from job.forward(call, self.data if data is None else data, self.sync))

    def back(self, job: Any, loss: torch.Tensor, retain: bool = False) -> Run:
        weight = None if self.weights is None else self.weights[job.rank % len(self.weights)]
        yield from job.backward(loss, self.sync, weight, retain)


@dataclass(frozen=True, repr=False)
class Backward(Pass):
    """The usual way. `peek` names the rank that first looks at the gradient of its input, as for a saliency map."""

    peek: int | None = None

    def run(self, job: Any) -> Run:
        loss = loss_of((yield from self.out(job)))
        if self.peek in (EVERY_RANK, job.rank):
            torch.autograd.grad(loss, job.x, retain_graph=True)
        yield from self.back(job, loss)


@dataclass(frozen=True, repr=False)
class TwoForwards(Pass):
    """Two forwards, then one backward of the sum, or `each` its own."""

    each: bool = False

    def run(self, job: Any) -> Run:
        first = loss_of((yield from self.out(job)))
        second = loss_of((yield from self.out(job, self.data + 500)))
        if not self.each:
            yield from self.back(job, first + second)
            return
        yield from self.back(job, first)
        yield from self.back(job, second)


@dataclass(frozen=True, repr=False)
class Twice(Pass):
    """Two backwards of one retained graph."""

    def run(self, job: Any) -> Run:
        loss = loss_of((yield from self.out(job)))
        yield from self.back(job, loss, retain=True)
        yield from self.back(job, loss)


@dataclass(frozen=True, repr=False)
class Partial(Pass):
    """The loss is made of what the first half of the route gave; with `rest`, the other half has a backward later."""

    rest: bool = False

    def run(self, job: Any) -> Run:
        out = yield from self.out(job, returns="both")
        yield from self.back(job, loss_of(out["half"][0]), retain=self.rest)
        if self.rest:
            yield from self.back(job, loss_of(out["all"]))


@dataclass(frozen=True, repr=False)
class Penalty(Pass):
    """A gradient penalty: the gradient of the output with respect to the input, with a backward through that."""

    alone: bool = True

    def run(self, job: Any) -> Run:
        loss = loss_of((yield from self.out(job)))
        (grad,) = torch.autograd.grad(loss, job.x, create_graph=True)
        penalty = (grad.square().sum(1) - 1).square().sum()  # no root, whose slope at zero is infinite
        yield from self.back(job, penalty if self.alone else loss + penalty)


@dataclass(frozen=True, repr=False)
class Hidden(Pass):
    """The loss comes from what the wrapper did not see: an object, an object beside a tensor, or an attribute."""

    where: str = "object"

    def run(self, job: Any) -> Run:
        out = yield from self.out(job, returns=self.where)
        if self.where == "aux":
            out = job.aux
        yield from self.back(job, loss_of(out[0] if self.where == "beside" else out))


@dataclass(frozen=True, repr=False)
class Inner(Pass):
    """The model runs a backward of its own inside forward; then the usual one follows, unless it is `alone`."""

    alone: bool = True

    def run(self, job: Any) -> Run:
        out = yield from self.out(job, inner=True)
        if self.alone:
            yield from job.ran_backward(self.sync)
        else:
            yield from self.back(job, loss_of(out))


@dataclass(frozen=True, repr=False)
class Fail(Pass):
    """A backward that raises midway on every rank, is caught, and the gradients zeroed. `apart`: on each somewhere else."""

    at: int = 0
    how: str = "none"
    apart: bool = False

    def run(self, job: Any) -> Run:
        at = (self.at + job.rank) % len(self.route(job)) if self.apart else self.at
        loss = loss_of((yield from self.out(job, boom=at)))
        job.fail(loss, self.sync)
        job.zero(self.how, "module")


@dataclass(frozen=True, repr=False)
class Poison(Pass):
    """A backward with `value` as rank `victim`'s gradient of a `part` (-1: of all); whatever is left of it is zeroed."""

    victim: int = 0
    part: int = -1
    value: str = "inf"

    def run(self, job: Any) -> Run:
        loss = loss_of((yield from self.out(job)))
        job.poison(loss, self.victim % job.program.ranks, self.part, float(self.value))
        job.zero("none", "module")


@dataclass(frozen=True, repr=False)
class Look(Value):
    """A forward without a backward: `mode` is "grad", "no_grad" or "eval"; or autograd.grad on `ranks`, "saliency"."""

    data: int
    routes: tuple[Route, ...]
    mode: str = "eval"
    rank: int = EVERY_RANK

    def run(self, job: Any) -> Run:
        mine = self.rank in (EVERY_RANK, job.rank)
        call = Call(self.routes[job.rank % len(self.routes)])
        if self.mode in ("grad", "saliency"):
            # Every rank runs the forward, which may synchronise buffers; one rank alone may ask for gradients of it.
            out = yield from job.forward(call, self.data, True)
            if mine and self.mode == "saliency":
                torch.autograd.grad(loss_of(out), job.x)
            return
        with torch.no_grad():
            job.model.train(self.mode != "eval")
            if mine:
                yield from job.forward(call, self.data, True)
            job.model.train()


@dataclass(frozen=True, repr=False)
class Zero(Value):
    """zero_grad, `via` the module, the wrapper or the optimizer; `how` is "none" or "zeros"."""

    how: str = "none"
    via: str = "module"

    def run(self, job: Any) -> Run:
        job.zero(self.how, self.via)
        yield from ()


@dataclass(frozen=True, repr=False)
class Step(Value):
    """An optimizer step, after clipping to `clip` if that is given."""

    clip: float | None = None

    def run(self, job: Any) -> Run:
        if self.clip is not None:
            job.clip(self.clip)
        job.step()
        yield from ()


@dataclass(frozen=True, repr=False)
class Keep(Value):
    """The user keeps every `.grad`: what is kept must never change from now on."""

    def run(self, job: Any) -> Run:
        job.keep()
        yield from ()


@dataclass(frozen=True, repr=False)
class Place(Value):
    """The user puts tensors into `.grad`: values of each rank's "own", "alike" on all, or zeros in one "flat" buffer."""

    how: str = "own"

    def run(self, job: Any) -> Run:
        params = [p for p in job.model.parameters() if p.requires_grad]
        chance = torch.Generator().manual_seed(77 + (job.rank if self.how == "own" else 0))
        flat = {p.dtype: torch.zeros(sum(q.numel() for q in params), dtype=p.dtype) for p in params}
        at = 0
        for p in params:
            place = flat[p.dtype][at : at + p.numel()].view(p.shape)
            at += p.numel()
            p.grad = place if self.how == "flat" else torch.randn(p.shape, generator=chance).to(p.dtype)
        job.place(params, list(flat.values()) if self.how == "flat" else [p.grad for p in params])
        yield from ()


@dataclass(frozen=True, repr=False)
class Listen(Value):
    """From now on the user has a hook behind every `every`-th gradient, which reads it or (`scale`) changes it."""

    every: int = 1
    scale: bool = False

    def run(self, job: Any) -> Run:
        for number, param in enumerate(job.model.parameters()):
            if number % self.every == 0 and param.requires_grad:
                job.listen(number, param, self.scale)
        yield from ()


@dataclass(frozen=True, repr=False)
class Reload(Value):
    """A state is loaded: the "module"'s of the start, or the "optimizer"'s of this moment."""

    what: str = "module"

    def run(self, job: Any) -> Run:
        job.reload(self.what)
        yield from ()


@dataclass(frozen=True, repr=False)
class Rate(Value):
    """The learning rate changes."""

    factor: float = 0.5

    def run(self, job: Any) -> Run:
        for group in job.optimizer.param_groups:
            group["lr"] *= self.factor
        yield from ()


@dataclass(frozen=True, repr=False)
class Retype(Value):
    """The module goes to another dtype and back ("double"), or to another memory format ("channels_last")."""

    how: str = "double"

    def run(self, job: Any) -> Run:
        if self.how == "double":
            job.model.double().float()
        else:
            job.model.to(memory_format=getattr(torch, self.how))
        yield from ()


@dataclass(frozen=True, repr=False)
class Freeze(Value):
    """A part is frozen after wrapping, or no longer."""

    part: int
    frozen: bool = True

    def run(self, job: Any) -> Run:
        for param in job.model.parts[self.part].parameters():
            param.requires_grad_(not self.frozen)
        yield from ()


@dataclass(frozen=True, repr=False)
class Join(Pass):
    """A loop with `counts[rank]` inputs on each rank, inside torch's Join. `initial` is what the mean is divided by."""

    counts: tuple[int, ...] = (1, 2)
    initial: bool = True
    # Parts that nobody runs after the first turn.
    dropped: tuple[int, ...] = ()

    def run(self, job: Any) -> Run:
        mine = self.counts[job.rank % len(self.counts)]
        with ExitStack() as stack:
            job.enter_join(stack, self.initial)
            for turn in range(job.turns(self.counts)):
                if turn >= mine:
                    yield from job.absent(self.initial)
                    continue
                job.zero("none", "optimizer")
                route = tuple(use for use in self.route(job) if not (turn and use[0] in self.dropped))
                out = yield from job.forward(Call(route), self.data + turn, True)
                yield from job.backward(loss_of(out), True, None, False)
                job.step()
        yield from job.leave_join(self.counts)
        job.zero("none", "module")
