"""What may happen in a program. Each event is a value with a `run`, the same for the ranks and for the reference.

`run` is a generator: in the reference it stops wherever ranks have to meet (`reference.py`); on the ranks it never does.
What a job is: `job.py`. The ways to a gradient are in `passes.py`; here is everything that happens around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.passes import (
    EVERY_RANK,
    Apart,
    Backward,
    Closure,
    Fail,
    Hidden,
    Inner,
    Join,
    Partial,
    Pass,
    Penalty,
    Poison,
    Run,
    Twice,
    TwoForwards,
    loss_of,
)
from tests.fuzz.program import Call, Route, Value

__all__ = [
    "EVERY_RANK",
    "Apart",
    "Backward",
    "Closure",
    "Dtype",
    "Fail",
    "Freeze",
    "GradDtype",
    "Group",
    "Hidden",
    "Inner",
    "Join",
    "Keep",
    "Listen",
    "Look",
    "Move",
    "Partial",
    "Pass",
    "Penalty",
    "Place",
    "Poison",
    "Rate",
    "Reload",
    "Retype",
    "Step",
    "Twice",
    "TwoForwards",
    "Zero",
    "loss_of",
]


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
    """zero_grad, `via` the module, the wrapper or the optimizer, of all models or of these; `how` is "none" or "zeros"."""

    how: str = "none"
    via: str = "module"
    models: tuple[int, ...] | None = None

    def run(self, job: Any) -> Run:
        job.zero(self.how, self.via, self.models)
        yield from ()


@dataclass(frozen=True, repr=False)
class Step(Value):
    """An optimizer step, of all models or of these, after clipping to `clip` if that is given."""

    clip: float | None = None
    models: tuple[int, ...] | None = None

    def run(self, job: Any) -> Run:
        if self.clip is not None:
            job.clip(self.clip, self.models)
        job.step(self.models)
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
        job.rate(self.factor)
        yield from ()


@dataclass(frozen=True, repr=False)
class Group(Value):
    """The optimizer gets another group: of a `part` that was held back, or (-1) of a frozen parameter of nobody's."""

    part: int
    rate: float = 0.03

    def run(self, job: Any) -> Run:
        job.add_group(self.part, self.rate)
        yield from ()


@dataclass(frozen=True, repr=False)
class Dtype(Value):
    """The model goes to another dtype and stays there; `zeroed`, without gradients."""

    dtype: str = "float64"
    zeroed: bool = False

    def run(self, job: Any) -> Run:
        if self.zeroed:
            job.zero("none", "module")
        job.model.to(getattr(torch, self.dtype))
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
class GradDtype(Value):
    """The gradients of a part are of a dtype of their own from now on; those that are there are dropped."""

    part: int
    dtype: str = "float32"

    def run(self, job: Any) -> Run:
        for param in job.model.parts[self.part].parameters():
            param.grad = None
            param.grad_dtype = getattr(torch, self.dtype)
        yield from ()


@dataclass(frozen=True, repr=False)
class Move(Value):
    """The gradients of a part go to another one of the same shapes: as new tensors ("detached"), or in turn ("swapped")."""

    source: int
    target: int
    how: str = "detached"

    def run(self, job: Any) -> Run:
        parts = job.model.parts
        for source, target in zip(parts[self.source].parameters(), parts[self.target].parameters(), strict=True):
            if self.how == "swapped":
                source.grad, target.grad = target.grad, source.grad
            elif source.grad is not None:
                target.grad, source.grad = source.grad.detach(), None
        yield from ()
