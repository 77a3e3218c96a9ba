"""The weighted mean: unequal numbers of tokens or samples, carried in the bucket itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.comm import hooks
from phalanx.comm.hooks import allreduce_hook
from tests.cluster import run_ranks
from tests.ddp.by_hand import Net, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = pytest.mark.covering(1)


def weighted(rank: int, world: int, weights: list[float], dtype: torch.dtype, views: bool, hook: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 2).to(dtype)
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views)
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        wrapped.zero_grad()
        torch.manual_seed(10 * step + rank)
        loss = wrapped(torch.randn(4, 6, dtype=dtype)).pow(2).mean()
        with wrapped.weight(weights[rank]):
            loss.backward()
    return model.weight.grad.clone()


def reference(weights: list[float], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(2, 6, dtype=torch.float64)
    for rank, weight in enumerate(weights):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).to(dtype)
        torch.manual_seed(20 + rank)
        model(torch.randn(4, 6, dtype=dtype)).pow(2).mean().backward()
        total += model.weight.grad.double() * weight
    return total / sum(weights)


@pytest.mark.parametrize("weights", [[3, 1, 2], [0, 7, 7], [1000003, 1, 65536], [0.5, 0.25, 2.0], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_are_the_weighted_mean(weights: list[float], views: bool) -> None:
    results = run_ranks(3, weighted, weights, torch.float32, views, False)
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), reference(weights, torch.float32), rtol=1e-5, atol=1e-6)


def rows_beside_a_hook(rank: int, world: int) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    wrapped = phalanx.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        model.zero_grad()
        loss = wrapped(torch.tensor([rank, 5])).sum()
        with wrapped.weight(1 + 2 * rank):
            loss.backward()
    expected = torch.tensor([0.25, 0.75, 0.0, 0.0, 0.0, 1.0]).unsqueeze(1).expand(6, 2)
    torch.testing.assert_close(model.weight.grad.to_dense(), expected)


def test_sparse_gradients_are_weighted_beside_a_hook() -> None:
    run_ranks(2, rows_beside_a_hook, backend="gloo")


def test_weights_are_exact_in_low_precision_and_beside_a_hook() -> None:
    for dtype, hook, tolerance in ((torch.bfloat16, False, 2e-2), (torch.float32, True, 1e-5)):
        results = run_ranks(2, weighted, [12345, 54321], dtype, False, hook)
        torch.testing.assert_close(
            results[0].double(), reference([12345, 54321], dtype), rtol=tolerance, atol=tolerance
        )
        assert torch.equal(*results)


def one_rank_gives_a_weight(rank: int, world: int) -> torch.Tensor:
    model = nn.Linear(1, 1, bias=False)
    wrapped = phalanx.DistributedDataParallel(model)
    loss = wrapped(torch.full((1, 1), float(rank + 1))).sum()
    if rank == 0:
        with wrapped.weight(3):
            loss.backward()
    else:
        loss.backward()
    return model.weight.grad


def test_a_rank_that_gives_no_weight_counts_one() -> None:
    results = run_ranks(2, one_rank_gives_a_weight)
    for result in results:
        torch.testing.assert_close(result, torch.tensor([[(3 * 1.0 + 1 * 2.0) / 4]]))


def bad_weights(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(nn.Linear(2, 2))
    for bad in (-1, float("nan"), float("inf"), "many", True, None):
        with pytest.raises(phalanx.PhalanxError, match="weight"), wrapped.weight(bad):  # type: ignore[arg-type]
            pass


def test_weights_that_make_no_mean_are_refused() -> None:
    run_ranks(1, bad_weights)


def nobody_has_anything(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    wrapped = phalanx.DistributedDataParallel(model)
    with wrapped.weight(0):
        wrapped(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))


def test_weights_of_zero_everywhere_give_zero_gradients() -> None:
    run_ranks(2, nobody_has_anything)


# -- very small, very large, of any size -----------------------------------------------------------


def any_size(
    rank: int, world: int, width: int, weights: list[float], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With a micro-batch under no_sync, which counts as the backward does that reduces it."""
    model = Net(width).to(dtype)
    plain = unwrapped(model).double()
    delayed = [("a.weight", model.a.weight)] if options.pop("delayed", False) else None
    hook, looks = options.pop("hook", None), options.pop("looks", False)
    wrapped = phalanx.DistributedDataParallel(
        model,
        bucket_cap_mb=0.05,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model.b.weight if delayed else None,
        **options,
    )
    if hook is not None:
        wrapped.register_comm_hook(None, getattr(hooks, hook))

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(inputs(step, rank, width).to(dtype).to(next(model.parameters()).dtype)).square().mean()

    for step in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, step + 50, rank).backward()
        x = inputs(step, rank, width).to(dtype).requires_grad_()
        output = wrapped(x).square().mean()
        if looks and step > 0:
            torch.autograd.grad(output, x, retain_graph=True)  # which is no backward, and takes no weight
        with wrapped.weight(weights[rank]):
            output.backward()
        expected = mean_by_hand(
            plain, world, lambda m, r, step=step: loss(m, step, r) + loss(m, step + 50, r), weights
        )
        # In half precision gradients of ranks that cancel out leave few digits.
        assert_mean(model, expected, tolerance=0.05 if dtype is torch.float16 or hook is not None else 1e-5)


FAR_APART = [[1e-7, 1e-7], [1e-5, 3e-5], [3e5, 2e5], [1e-9, 1e9], [4096.0, 0.0]]


@everywhere
@widths
@pytest.mark.parametrize("weights", FAR_APART, ids=str)
def test_only_the_ratio_of_weights_counts(weights: list[float], width: int, backend: str) -> None:
    run_ranks(2, any_size, width, weights, torch.float32, {}, backend=backend)


@everywhere
@widths
@pytest.mark.parametrize("weights", [[3e5, 2e5], [1e-7, 3e-7], [4096.0, 2048.0]], ids=str)
def test_weights_neither_overflow_nor_vanish_in_half_precision(weights: list[float], width: int, backend: str) -> None:
    run_ranks(2, any_size, width, weights, torch.float16, {}, backend=backend)
    run_ranks(2, any_size, width, weights, torch.float32, {"hook": "fp16_compress_hook"}, backend=backend)


@everywhere
@widths
@pytest.mark.parametrize(
    "options",
    [{"delayed": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"looks": True}],
    ids=lambda options: next(iter(options)),
)
def test_weights_count_for_every_parameter_in_every_mode(options: dict[str, Any], width: int, backend: str) -> None:
    run_ranks(2, any_size, width, [1.0, 3.0], torch.float32, dict(options), backend=backend)
