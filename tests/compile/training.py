"""Training a model of the zoo on one rank, eagerly or compiled, and what there is to compare afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.compile import Explanation, explain, phalanx_backend
from phalanx.observe import trace
from tests.compile import zoo

Compile = Callable[[nn.Module], Any]


def eager(wrapper: nn.Module) -> Any:
    return wrapper


def cut(wrapper: nn.Module, compiler: Any = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(wrapper, backend=phalanx_backend, options={"compiler": compiler}, **kwargs)


def uncut(wrapper: nn.Module) -> Any:
    return torch.compile(wrapper, backend="aot_eager")


def wrap(name: str, prepare: Compile = eager, **options: Any) -> phalanx.DistributedDataParallel:
    """A new model of the zoo in a wrapper; `prepare` may compile it before it is wrapped."""
    options = {"bucket_cap_mb": zoo.MODELS[name].cap_mb, "on_unused": "ignore"} | options
    return phalanx.DistributedDataParallel(prepare(zoo.make(name)), **options)


@dataclass
class Trained:
    """What training has left: losses and all gradients of each step, and the state at the end."""

    wrapper: phalanx.DistributedDataParallel
    values: list[list[torch.Tensor]]
    state: list[torch.Tensor]
    launched_early: int
    """Buckets of the last step that left before the last compiled backward had ended."""

    def equals(self, other: Trained) -> bool:
        """Bit for bit."""
        mine = [*self.state, *(value for step in self.values for value in step)]
        theirs = [*other.state, *(value for step in other.values for value in step)]
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def is_close_to(self, other: Trained, **tolerances: float) -> bool:
        mine = [*self.state, *(value for step in self.values for value in step)]
        theirs = [*other.state, *(value for step in other.values for value in step)]
        return all(torch.allclose(a, b, **tolerances) for a, b in zip(mine, theirs, strict=True))


def train(
    rank: int, wrapper: phalanx.DistributedDataParallel, compiled: Any, sizes: Sequence[int] = (4, 4, 4)
) -> Trained:
    """One step of SGD for each of the batch `sizes`, from the same random state for everybody."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    torch.manual_seed(77 + rank)
    values = []
    ends: list[int] = []
    for step, size in enumerate(sizes):
        x, target = zoo.batch(step, rank, size)
        loss = (zoo.prediction(compiled(x)) - target).square().mean()
        optimizer.zero_grad()
        ends = note_ends(loss)
        loss.backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in wrapper.parameters()]
        values.append([loss.detach(), *gradients])
        optimizer.step()
    state = [value.clone() for value in wrapper.state_dict().values()]
    times = wrapper.timeline.latest
    assert times is not None
    early = sum(bucket.launched_ns < max(ends, default=0) for bucket in times.buckets)
    return Trained(wrapper, values, state, early)


def note_ends(loss: torch.Tensor) -> list[int]:
    """Filled during backward with the moments at which compiled backwards end."""
    ends: list[int] = []
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            node.register_hook(lambda *_: ends.append(trace.now_ns()))
    return ends


def train_both(rank: int, name: str, compile_it: Compile = cut, sizes: Sequence[int] = (4, 4, 4)) -> tuple[Trained, Trained]:
    """The same model trained eagerly and compiled, under wrappers of their own."""
    torch._dynamo.reset()
    trained = []
    for make in (eager, compile_it):
        wrapper = wrap(name)
        trained.append(train(rank, wrapper, make(wrapper), sizes))
    return trained[0], trained[1]


def check_one_plan(wrapper: phalanx.DistributedDataParallel, made_of_pieces: bool = True) -> Explanation:
    """The reducer's plan is the splitter's. One that was made of pieces divides none between buckets of a kind."""
    explanation = explain(wrapper)
    plan = wrapper.plan
    assert explanation.plan.hash == plan.hash == wrapper.stats().plan_hash
    kinds = {spec.name: (spec.dtype, spec.device, spec.sparse) for spec in plan.specs}
    bucket_of = {plan.specs[slot.param].name: bucket.index for bucket in plan.buckets for slot in bucket.slots}
    cuts = len(explanation.pieces) > len({piece.graph for piece in explanation.pieces})
    for piece in explanation.pieces if made_of_pieces and cuts else ():
        for kind in {kinds[name] for name in piece.params}:
            assert len({bucket_of[name] for name in piece.params if kinds[name] == kind}) == 1, piece
    assert any(piece.buckets for piece in explanation.pieces)
    return explanation
