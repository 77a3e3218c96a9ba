"""What may differ between ranks: each row trains, nobody complains, and all ranks end with the same bits."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.comm import hooks
from phalanx.ddp.features.settings import TailSettings
from tests.mismatch.rows import Odd, model, wrap, zero

_STEPS = 3

Row = Callable[[Odd], list[torch.Tensor]]


def trains(
    prepare: Callable[[Odd, Any], Any] | None = None, forward: Callable[[Odd, Any], torch.Tensor] | None = None
) -> Callable[[Odd], list[torch.Tensor]]:
    """Three steps of which the odd rank makes its own version; the parameters afterwards."""

    def row(world: Odd) -> list[torch.Tensor]:
        wrapped = wrap(find_unused_parameters=True)
        called = prepare(world, wrapped) if prepare is not None else None
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            loss = (wrapped if called is None else called)(_inputs(world)) if forward is None else forward(world, wrapped)
            loss.square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in wrapped.parameters()]

    return row


def _inputs(world: Odd) -> torch.Tensor:
    return torch.full((2, 8), float(world.rank + 1), dtype=torch.float32)


def compiled(world: Odd, wrapped: Any) -> Any:
    return torch.compile(wrapped, backend="phalanx") if world.odd else wrapped


def another_default(world: Odd, wrapped: Any) -> None:
    torch.set_default_dtype(world.pick(torch.float32, torch.float64))


def threads(world: Odd, wrapped: Any) -> None:
    torch.set_num_threads(world.pick(1, 2))


def variables(world: Odd, wrapped: Any) -> None:
    if world.odd:
        os.environ.update(PHALANX_TRACEBACK="full", PHALANX_KEEP_FREED="0", PHALANX_WARM="0", TORCH_SHOW_CPP_STACKTRACES="1")


def user_hooks(world: Odd, wrapped: Any) -> None:
    def logged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hooks.allreduce_hook(state, bucket)

    def plain(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hooks.allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, world.pick(plain, logged))


def frozen(world: Odd, wrapped: Any) -> None:
    """It gives nothing to the mean any more, and is given it all the same."""
    if world.odd:
        wrapped.module[0].weight.requires_grad_(False)


def dropped(world: Odd, wrapped: Any) -> None:
    """An optimizer that nobody needs any more. When its memory is freed differs between ranks."""
    made = zero(wrapped.parameters())
    for group in made.param_groups:
        group["lr"] = 0.5
    if world.odd:
        del made
        gc.collect()
    else:
        wrapped.__dict__["kept"] = made


def watched(world: Odd, wrapped: Any) -> None:
    if world.odd:
        for parameter in wrapped.parameters():
            parameter.register_hook(lambda grad: None)
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)


def other_function(world: Odd, wrapped: Any) -> torch.Tensor:
    """The odd rank's model file applies another function, and leaves a layer out."""
    wrapped.module.forward = world.pick(
        lambda x: wrapped.module[2](wrapped.module[1](wrapped.module[0](x))),
        lambda x: wrapped.module[2](wrapped.module[0](x).relu()),
    )
    output: torch.Tensor = wrapped(_inputs(world))
    return output


def lower(world: Odd, wrapped: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=world.odd):
        output: torch.Tensor = wrapped(_inputs(world))
    return output


def evaluated(world: Odd, wrapped: Any) -> torch.Tensor:
    wrapped.train(not world.odd)
    output: torch.Tensor = wrapped(_inputs(world))
    return output


def kept(world: Odd) -> list[torch.Tensor]:
    """Which checkpoints stay is rank 0's word; how long a rank waits is its own."""
    net = model()
    wrapped = phalanx.DistributedDataParallel(net)
    options = world.pick({"keep": 2}, {"keep": 1, "timeout_s": 30, "extra": {"own": 1}})
    with phalanx.Checkpointer(str(world.folder), wrapped, **options) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
        checkpointer.wait()
        assert checkpointer.restore() is not None
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def seeded(world: Odd) -> list[torch.Tensor]:
    """Other random numbers before the model is made: the model of rank 0 is everybody's."""
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    wrapped = phalanx.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(_STEPS):
        wrapped(_inputs(world)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


class Divided(torch.optim.Optimizer):
    """One of its own kind, of which the odd rank has the work done by an optimizer inside of it."""

    def __init__(self, params: Any, inner: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1) if inner else None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.inner is not None:
            self.inner.step()
            return
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)


class WithItsRank(torch.optim.SGD):
    """Some keep among their options which rank they are, and where."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, lr=0.1)
        for name, value in {"rank": rank, "log": f"rank-{rank}.log", "devices": [rank]}.items():
            self.defaults[name] = self.param_groups[0][name] = value


def options_of_its_own(world: Odd) -> list[torch.Tensor]:
    """And what the script keeps beside an optimizer's options."""
    wrapped = wrap()
    optimizer = WithItsRank(wrapped.parameters(), world.rank)
    optimizer.param_groups[0]["num_samples"] = 100 + world.rank
    for _ in range(_STEPS):
        optimizer.zero_grad()
        wrapped(_inputs(world)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def steps_inside_steps(world: Odd) -> list[torch.Tensor]:
    """And before that a step by which nothing changes, as checkpoints make one for an optimizer without state."""
    wrapped = wrap()
    if world.odd:
        for parameter in wrapped.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(wrapped.parameters(), lr=0.0).step()
    optimizer = Divided(wrapped.parameters(), world.odd)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        wrapped(_inputs(world)).sum().backward()
        optimizer.step()
    told = [listener for listener in wrapped.reducer.listeners if isinstance(listener, TailSettings)]
    assert [each._witness.num_steps for each in told] == [_STEPS]
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def made_good(train_apart: Callable[[Odd, Any, torch.optim.Optimizer], None]) -> Row:
    """Ranks do something by themselves before each step that they make together, after which parameters are equal again."""

    def row(world: Odd) -> list[torch.Tensor]:
        wrapped = wrap()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        for _ in range(_STEPS):
            train_apart(world, wrapped, optimizer)
            optimizer.zero_grad()
            wrapped(_inputs(world)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in wrapped.parameters()]

    return row


def looks_for_a_rate(world: Odd, wrapped: Any, _optimizer: torch.optim.Optimizer) -> None:
    """On one rank, which then loads what it had."""
    saved = {name: value.clone() for name, value in wrapped.state_dict().items()}
    if world.odd:
        finder = torch.optim.SGD(wrapped.parameters(), lr=0.001)
        for _ in range(5):
            finder.zero_grad()
            wrapped.module(_inputs(world)).square().mean().backward()
            finder.step()
            finder.param_groups[0]["lr"] *= 2
    wrapped.load_state_dict(saved)


def local_steps(world: Odd, wrapped: Any, optimizer: torch.optim.Optimizer) -> None:
    """As many as each rank has data for; then ranks take the mean of their parameters."""
    with wrapped.no_sync():
        for _ in range(world.pick(1, 3)):
            optimizer.zero_grad()
            wrapped(_inputs(world)).square().mean().backward()
            optimizer.step()
    for parameter in wrapped.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world.num_ranks


def another_part(world: Odd, wrapped: Any, optimizer: torch.optim.Optimizer) -> None:
    """One rank trains a part of its own on top of the model, by an optimizer that has the model's parameters, too."""
    if world.odd:
        own = nn.Linear(8, 8)
        everything = torch.optim.SGD([*wrapped.parameters(), *own.parameters()], lr=0.3)
        everything.zero_grad()
        own(wrapped.module(_inputs(world)).detach()).sum().backward()
        everything.step()


def slower_after_a_backward_that_raised(world: Odd) -> list[torch.Tensor]:
    """At its end on most ranks, which had sent some buckets by then; on the odd one before any gradient."""

    def raises(_grad: torch.Tensor) -> None:
        raise ArithmeticError("raised on purpose")

    wrapped = wrap()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(2 * _STEPS):
        optimizer.zero_grad()
        inputs = _inputs(world).requires_grad_()
        output = wrapped(inputs)
        if step == _STEPS:
            world.pick(inputs, output).register_hook(raises)
            with pytest.raises(ArithmeticError):
                output.square().mean().backward()
            optimizer.param_groups[0]["lr"] /= 2
            continue
        output.square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def divided_by_hand(world: Odd) -> list[torch.Tensor]:
    """Each rank steps the parameters that it owns, with options of its own, and sends them to the others."""
    wrapped = wrap()
    params = list(wrapped.parameters())
    owned = params[world.rank :: world.num_ranks]
    optimizer = torch.optim.Adam(owned, lr=0.01 * (world.rank + 1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 + 0.1 * world.rank)
    for _ in range(_STEPS):
        wrapped.zero_grad()
        wrapped(_inputs(world)).square().mean().backward()
        optimizer.step()
        schedule.step()
        for number, parameter in enumerate(params):
            dist.broadcast(parameter.data, number % world.num_ranks)
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def divided_otherwise(world: Odd) -> list[torch.Tensor]:
    """Groups of other parameters, with the same options."""
    wrapped = wrap()
    params = list(wrapped.parameters())
    first = world.pick(4, 2)
    optimizer = torch.optim.Adam([{"params": params[:first]}, {"params": params[first:]}], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2 * _STEPS):
        optimizer.zero_grad()
        wrapped(_inputs(world)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def groups_of_its_own(world: Odd) -> list[torch.Tensor]:
    """A layer of one rank's own comes first in its optimizer; and its rate is one of NumPy's numbers."""
    wrapped, own = wrap(), nn.Linear(8, 8)
    groups = world.pick([], [{"params": own.parameters(), "lr": 0.5}])
    rate = world.pick(0.01, np.float64(0.01))
    optimizer = torch.optim.SGD([*groups, {"params": wrapped.parameters()}], lr=rate)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        inputs = _inputs(world)
        wrapped(own(inputs) if world.odd else inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def after_uneven_inputs(world: Odd) -> list[torch.Tensor]:
    """A rank that has joined makes no steps of its own; in the epoch after that all do again."""
    wrapped = wrap()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for context, num_batches in ((wrapped.join(), world.pick(_STEPS, 1)), (contextlib.nullcontext(), _STEPS)):
        with context:
            for _ in range(num_batches):
                optimizer.zero_grad()
                wrapped(_inputs(world)).sum().backward()
                optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


ROWS: dict[str, Row] = {
    "compiled": trains(compiled),
    "default dtype": trains(another_default),
    "threads": trains(threads),
    "variables": trains(variables),
    "user's hooks": trains(user_hooks),
    "rate halved after a backward that raised": slower_after_a_backward_that_raised,
    "watched gradients": trains(watched),
    "frozen later": trains(frozen),
    "freed earlier": trains(dropped),
    "another function": trains(forward=other_function),
    "autocast": trains(forward=lower),
    "evaluation mode": trains(forward=evaluated),
    "kept checkpoints": kept,
    "seeds": seeded,
    "a step inside a step": steps_inside_steps,
    "options of its own": options_of_its_own,
    "a search for a rate": made_good(looks_for_a_rate),
    "local steps": made_good(local_steps),
    "a step of another part": made_good(another_part),
    "divided by hand": divided_by_hand,
    "groups of its own": groups_of_its_own,
    "groups divided otherwise": divided_otherwise,
    "uneven inputs": after_uneven_inputs,
}


def tried(rank: int, world: int, name: str, folder: Any) -> list[torch.Tensor]:
    """One rank of a row; what it changed in its process is put back."""
    environ, dtype, num_threads = dict(os.environ), torch.get_default_dtype(), torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ROWS[name](Odd(rank, world, folder))
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(environ)
