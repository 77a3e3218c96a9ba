"""Communication hooks inside the wrapper: torch's tests of them, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import phalanx
from phalanx.comm import hooks
from phalanx.errors import ArgumentTypeError, ConfigError, ReductionError
from tests.cluster import run_ranks

pytestmark = pytest.mark.covering(1)

Future = torch.futures.Future[torch.Tensor]


class Scaled(nn.Module):
    """Rank r multiplies by (r + 1), so the mean of the gradients is known."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.left, self.right = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3, 3))

    def forward(self) -> torch.Tensor:
        return (self.left.sum() + self.right.sum()) * (self.rank + 1)


def constant_hook(_state: object, bucket: dist.GradBucket) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(torch.ones_like(bucket.buffer()))
    return future.then(lambda done: done.value() + torch.ones_like(done.value()))


def chained_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future:
    size = group.size()  # a callback that held the group could be the last to do so, in the group's own thread
    future = group.allreduce([bucket.buffer()]).get_future()
    return future.then(lambda done: 2 * done.value()[0]).then(lambda done: done.value() / (2 * size))


def list_hook(group: dist.ProcessGroup, bucket: dist.GradBucket):
    """Its future holds a list of one tensor, as those of c10d do."""
    buffer = bucket.buffer().div_(group.size())
    return group.allreduce([buffer]).get_future()


OPTIONS: dict[str, dict[str, bool]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def run_hook(rank: int, world: int, hook: Callable[..., Any], options: dict[str, bool]) -> list[torch.Tensor]:
    wrapped = phalanx.DistributedDataParallel(Scaled(rank), bucket_cap_mb=0.00001, **options)
    wrapped.register_comm_hook(dist.group.WORLD, hook)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped().backward()
    return [param.grad for param in wrapped.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("hook", "value"), [(constant_hook, 2.0), (chained_hook, 1.5), (list_hook, 1.5)])
def test_the_gradient_is_what_the_hooks_future_holds(hook: Callable[..., Any], value: float, options: str) -> None:
    for left, right in run_ranks(2, run_hook, hook, OPTIONS[options]):
        assert torch.equal(left, torch.full((2, 2), value)) and torch.equal(right, torch.full((3, 3), value))


def refused_hooks(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(Scaled(rank))

    def wrong_bucket(state: object, bucket: int) -> Future:
        raise AssertionError("never called")

    def wrong_return(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError("never called")

    with pytest.raises(ArgumentTypeError, match="Communication hook must be callable"):
        wrapped.register_comm_hook(None, 1)
    assert "must be callable" in wrapped._get_ddp_logging_data()["error"]
    with pytest.raises(ConfigError, match=r"bucket annotation should be dist\.GradBucket"):
        wrapped.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ConfigError, match=r"return annotation should be torch\.futures\.Future"):
        wrapped.register_comm_hook(None, wrong_return)
    wrapped.register_comm_hook(None, lambda state, bucket: 1)
    with pytest.raises(ReductionError, match="can only be called once"):
        wrapped.register_comm_hook(None, constant_hook)
    with pytest.raises(RuntimeError, match=r"callback must return a torch\.futures\.Future object, but got int"):
        wrapped().backward()


def test_hooks_that_cannot_be_one_are_refused_in_torchs_words() -> None:
    run_ranks(2, refused_hooks)


def order_of_buckets(rank: int, world: int, views: bool) -> list[list[tuple[int, bool]]]:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=views)
    seen: list[tuple[int, bool]] = []

    def hook(state: list[tuple[int, bool]], bucket: dist.GradBucket) -> Future:
        state.append((bucket.index(), bucket.is_last()))
        assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
        assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
        future: Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(seen, hook)
    steps = []
    for _ in range(3):
        wrapped(torch.ones(2, 8)).sum().backward()
        steps.append(list(seen))
        seen.clear()
    return steps


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_hooks_see_the_buckets_in_order_and_know_the_last(views: bool) -> None:
    for steps in run_ranks(2, order_of_buckets, views):
        for step in steps:
            count = len(step)
            assert count > 2 and step == [(index, index == count - 1) for index in range(count)]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


SPARSE_HOOKS: dict[str, Any] = {
    "none": None,
    "torch's all-reduce": default_hooks.allreduce_hook,
    "all-reduce": hooks.allreduce_hook,
    "fp16": hooks.fp16_compress_hook,
}


def sparse_through_hook(rank: int, world: int, name: str) -> list[Any]:
    torch.manual_seed(0)
    alone = Words()
    wrapped = phalanx.DistributedDataParallel(copy.deepcopy(alone))
    kinds: list[bool] = []
    hook: Any = SPARSE_HOOKS[name]

    def noting(state: Any, bucket: dist.GradBucket) -> Future:
        kinds.append(bucket.buffer().is_sparse)
        return hook(state, bucket)

    if hook is not None:
        wrapped.register_comm_hook(None, noting)
    good = []
    for _ in range(2):
        tokens = torch.randint(0, 10, (2 * world, 3))
        alone.zero_grad()
        wrapped.zero_grad()
        alone(tokens).square().mean().backward()
        wrapped(tokens[2 * rank : 2 * rank + 2]).square().mean().backward()
        for got, want in zip(wrapped.parameters(), alone.parameters(), strict=True):
            assert got.grad.is_sparse == want.grad.is_sparse
            good.append(torch.allclose(got.grad.to_dense(), want.grad.to_dense(), atol=1e-3))
    return [all(good), sorted(kinds)]


@pytest.mark.parametrize("name", SPARSE_HOOKS)
def test_sparse_gradients_go_through_the_hook_too(name: str) -> None:
    seen = [] if name == "none" else [False, False, True, True]
    assert run_ranks(2, sparse_through_hook, name) == [[True, seen]] * 2


def leaves_gradients_alone(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(Words())

    def nothing(_state: object, bucket: dist.GradBucket) -> Future:
        future: Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, nothing)
    wrapped(torch.full((1, 2), rank)).sum().backward()
    return wrapped.module.table.weight.grad.to_dense()


def test_a_hook_that_does_nothing_leaves_sparse_gradients_to_each_rank() -> None:
    first, second = run_ranks(2, leaves_gradients_alone)
    assert first[0].abs().sum() > 0 and first[1].abs().sum() == 0
    assert second[1].abs().sum() > 0 and second[0].abs().sum() == 0
