"""Ways to a gradient: events with a forward and a backward, as they come in training programs. See `events.py`."""

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
    """One forward and its backward. `routes` has one route for all ranks, or one per rank; so has `weights`.

    Of several models: `models` are those that run, in this order, and `together` says how (`program.Call`).
    """

    data: int
    routes: tuple[Route, ...]
    sync: bool = True
    weights: tuple[float, ...] | None = None
    models: tuple[int, ...] | None = None
    together: str = "chain"

    def route(self, job: Any) -> Route:
        return self.routes[job.rank % len(self.routes)]

    def out(self, job: Any, data: int | None = None, **how: Any) -> Any:
        call = Call(self.route(job), **how, models=self.models, together=self.together)
        return (yield from job.forward(call, self.data if data is None else data, self.sync))

    def back(self, job: Any, loss: torch.Tensor, retain: bool = False) -> Run:
        yield from job.backward(loss, self.sync, self.weight(job), retain, self.reached(len(job.nets)))

    def weight(self, job: Any) -> float | None:
        return None if self.weights is None else self.weights[job.rank % len(self.weights)]

    def reached(self, num_models: int) -> tuple[int, ...]:
        """The models that backward comes to."""
        models = tuple(range(num_models)) if self.models is None else self.models
        return models[-1:] if self.together == "cut" else models


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
class Apart(Pass):
    """Every model has a loss of its own, and a backward of its own, in the order of the forwards or in `reverse`."""

    reverse: bool = False

    def run(self, job: Any) -> Run:
        order = self.reached(len(job.nets))
        losses = {}
        for model in order:
            call = Call(self.route(job), models=(model,))
            losses[model] = loss_of((yield from job.forward(call, self.data + 100 * model, self.sync)))
        for model in reversed(order) if self.reverse else order:
            yield from job.backward(losses[model], self.sync, self.weight(job), False, (model,))


@dataclass(frozen=True, repr=False)
class Closure(Pass):
    """A step whose closure zeroes, runs forward and backward, and multiplies the learning rate, before or `late`."""

    rate: float = 1.0
    late: bool = False

    def run(self, job: Any) -> Run:
        yield from job.step_with(self.evaluate)

    def evaluate(self, job: Any) -> Run:
        job.zero("none", "optimizer")
        if not self.late:
            job.rate(self.rate)
        loss = loss_of((yield from self.out(job)))
        yield from self.back(job, loss)
        job.loss = loss.detach()
        if self.late:
            job.rate(self.rate)


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
