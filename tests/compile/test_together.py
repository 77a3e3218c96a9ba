"""Cut models together with what else a training script may use: ZeRO in backward, mixed precision, views, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import phalanx
from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import Trained, check_one_plan, cut, eager, note_ends, train, wrap

pytestmark = pytest.mark.timeout(60)


def both(rank: int, name: str, **options: Any) -> tuple[Trained, Trained]:
    torch._dynamo.reset()
    plain, compiled = wrap(name, **options), wrap(name, **options)
    return train(rank, plain, eager(plain)), train(rank, compiled, cut(compiled))


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed precision": ("mlp", {"mixed_precision": phalanx.MixedPrecision(torch.bfloat16, torch.float32)}),
    "low precision": ("mlp", {"mixed_precision": phalanx.MixedPrecision(torch.bfloat16, torch.bfloat16)}),
    "views": ("mlp", {"gradient_as_bucket_view": True}),
    "static": ("mlp", {"static_graph": True}),
    "skipping": ("unused", {"skip_all_reduce_unused_params": True}),
}
# With attention, and a weight that two layers share.
MORE_OPTIONS = OPTIONS | {"mixed precision": ("gpt", OPTIONS["mixed precision"][1])}


def train_with_options(rank: int, world: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for label, (name, options) in cases.items():
        plain, compiled = both(rank, name, **options)
        check_one_plan(compiled.wrapper)
        found[label] = (compiled.equals(plain), compiled.launched_early, len(compiled.wrapper.plan.buckets))
    return found


# On one rank: each compiles by itself, and what compiling with a second one adds is in the other tests here.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "world", "cases"),
    [
        pytest.param("gloo", 1, OPTIONS, id="alone"),
        pytest.param("gloo", 2, OPTIONS, id="gloo", marks=pytest.mark.thorough),
        pytest.param("phalanx", 2, MORE_OPTIONS, id="phalanx", marks=pytest.mark.thorough),
    ],
)
def test_options_of_the_wrapper_give_the_same_bits_and_keep_the_overlap(
    backend: str, world: int, cases: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    for found in run_ranks(world, train_with_options, cases, backend=backend):
        for label, (equal, early, num_buckets) in found.items():
            assert equal, label
            assert early >= num_buckets - 1 >= 1, label


def step_in_backward(rank: int, wrapper: Any, compiled: Callable[..., Any], options: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = phalanx.ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.Adam, lr=0.01, **options)
    losses = []
    early = 0
    for step in range(4):
        x, target = zoo.batch(step, rank)
        loss = (compiled(x) - target).square().mean()
        ends = note_ends(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times = wrapper.timeline.latest
        early = sum(bucket.launched_ns < max(ends, default=0) for bucket in times.buckets)
    return [torch.tensor(early), *losses, *(param.detach().clone() for param in wrapper.parameters())]


def train_zero(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for label, options in (
        ("after backward", {}),
        ("overlapped", {"overlap_with_ddp": True}),
        ("overlapped, gradients too", {"overlap_with_ddp": True, "stage": 2}),
    ):
        torch._dynamo.reset()
        results = []
        for compile_it in (eager, cut):
            wrapper = wrap("mlp")
            results.append(step_in_backward(rank, wrapper, compile_it(wrapper), options))
        check_one_plan(wrapper)
        (_, *plain), (early, *compiled) = results
        found[label] = (all(map(torch.equal, plain, compiled)), early.item(), len(wrapper.plan.buckets))
    return found


@pytest.mark.parametrize("backend", ["phalanx", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_zero_steps_the_same_bits_and_overlapped_zero_still_overlaps(backend: str) -> None:
    for found in run_ranks(2, train_zero, backend=backend):
        for label, (equal, early, num_buckets) in found.items():
            assert equal, label
            assert early >= num_buckets - 1 >= 2, label


def train_hooked(rank: int, world: int) -> list[bool]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    torch._dynamo.reset()
    results = []
    for compile_it in (eager, cut):
        wrapper = wrap("mlp")
        wrapper.register_comm_hook(None, allreduce_hook)
        results.append(train(rank, wrapper, compile_it(wrapper)))
    check_one_plan(wrapper)
    return [results[1].equals(results[0]), results[1].launched_early >= len(wrapper.plan.buckets) - 1]


def test_communication_hooks_get_the_buckets_of_the_cuts() -> None:
    assert run_ranks(2, train_hooked) == [[True, True]] * 2


def train_unevenly(rank: int, world: int) -> list[torch.Tensor]:
    torch._dynamo.reset()
    wrapper = wrap("mlp")
    compiled = cut(wrapper)
    with wrapper.join():
        for step in range(2 + 2 * rank):
            compiled(zoo.batch(step, rank)[0]).square().mean().backward()
    check_one_plan(wrapper)
    return [param.grad for param in wrapper.parameters() if param.grad is not None]


def test_a_rank_may_run_out_of_inputs() -> None:
    first, second = run_ranks(2, train_unevenly)
    assert len(first) == len(second) == 10


def different_graphs(rank: int, world: int) -> list[Any]:
    """Rank 1 is not compiled at all: rank 0's buckets hold on both."""
    torch._dynamo.reset()
    plain, other = wrap("mlp"), wrap("mlp")
    reference = train(rank, plain, eager(plain))
    trained = train(rank, other, cut(other) if rank == 0 else other)
    return [trained.equals(reference), other.plan.hash]


def test_ranks_that_are_compiled_and_ranks_that_are_not_share_the_plan() -> None:
    (equal, plan), (other_equal, other_plan) = run_ranks(2, different_graphs)
    assert equal and other_equal and plan == other_plan
