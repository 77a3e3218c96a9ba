"""Classes of users, derived from torch's and from ours: their own step is the one that is made, with hooks around it."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def step_dressed_up(rank: int, world: int, partition: str) -> list[int]:
    optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # with the first of them, torch makes the step of the class run hooks

    class Halving(optim.SGD):
        @wraps(optim.SGD.step)  # which also takes over that it runs hooks, and what is inside of it
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None if param.grad is None else param.grad * 0.5
            return super().step(closure)

    if partition == "element":
        phalanx.zero.elementwise(Halving)
    models = [Given(), Given()]
    plain = Halving(models[0].parameters(), lr=0.1)
    zero = phalanx.ZeroRedundancyOptimizer(models[1].parameters(), Halving, partition=partition, lr=0.1)
    for step in range(2):
        for model, optimizer in zip(models, (plain, zero), strict=True):
            set_gradients(list(model.parameters()), mean_gradients(model, step))
            optimizer.step()
    return differing(models[1], sample(models[0]))


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_a_step_that_passes_for_that_of_its_base_is_still_the_one_that_is_made(partition: str) -> None:
    assert run_ranks(2, step_dressed_up, partition) == [[]] * 2


def count_hooks_of_derived(rank: int, world: int, dressed_up: bool) -> list[str]:
    def step(self: Any, closure: Any = None) -> Any:
        return phalanx.ZeroRedundancyOptimizer.step(self, closure)

    dressed = wraps(phalanx.ZeroRedundancyOptimizer.step)(step) if dressed_up else step
    derived: Any = type("Derived", (phalanx.ZeroRedundancyOptimizer,), {"step": dressed})
    model, calls = Given(), []
    zero = derived(model.parameters(), optim.SGD, lr=0.1)
    zero.register_step_pre_hook(lambda *_: calls.append("before"))
    zero.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("global before"))
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    zero.step()
    handle.remove()
    return calls


@pytest.mark.parametrize("dressed_up", [False, True])
def test_hooks_run_once_around_the_step_of_a_derived_class(dressed_up: bool) -> None:
    assert run_ranks(2, count_hooks_of_derived, dressed_up) == [["global before", "before", "after"]] * 2


@phalanx.zero.elementwise
class Counting(optim.SGD):
    """Its rate falls with the number of its steps, which it keeps in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["steps"])


def count_steps(rank: int, world: int, in_backward: bool) -> Any:
    models = [Given(), Given()]
    plain = Counting(models[0].parameters(), lr=0.1)
    wrapped = phalanx.DistributedDataParallel(models[1], bucket_cap_mb=0.0005, on_unused="ignore")
    options = {"overlap_with_ddp": True, "step_in_backward": in_backward}
    zero = phalanx.ZeroRedundancyOptimizer(models[1].parameters(), Counting, lr=0.1, **options)
    for step in range(4):
        set_gradients(list(models[0].parameters()), mean_gradients(models[0], step))
        plain.step()
        zero.zero_grad()
        wrapped(own_gradients(models[1], step, rank, world)).backward()
        zero.step()
    return len(wrapped.reducer.buckets) > 1, differing(models[1], sample(models[0])), zero.param_groups[0]["steps"]


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_class_that_counts_its_steps_in_its_groups_counts_no_buckets(in_backward: bool) -> None:
    assert run_ranks(2, count_steps, in_backward) == [(True, [], 4)] * 2
