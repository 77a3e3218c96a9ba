"""Gradient accumulation: no_sync, several forwards, several backwards, and what zero_grad leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from tests.cluster import run_ranks
from tests.ddp.zoo import batch, make, prediction

pytestmark = pytest.mark.covering(1)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(prediction(model(x)), y)


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def _mean_grads(name: str, world: int, steps: list[int]) -> list[torch.Tensor]:
    model = make(name)
    for step in steps:
        for rank in range(world):
            (_loss(model, step, rank) / world).backward()
    return _grads(model)


def accumulated(rank: int, world: int, way: str, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    wrapped = phalanx.DistributedDataParallel(make("gpt"), bucket_cap_mb=0.001, **options)
    seen = []
    for _ in range(3):
        wrapped.zero_grad(set_to_none=options.get("set_to_none", True))
        if way == "no_sync":
            with wrapped.no_sync():
                _loss(wrapped, 0, rank).backward()
                local = _grads(wrapped)
                _loss(wrapped, 1, rank).backward()
            assert all(a.shape == b.shape for a, b in zip(local, _grads(wrapped), strict=True))
            _loss(wrapped, 2, rank).backward()
        elif way == "forwards":
            losses = [_loss(wrapped, step, rank) for step in range(3)]
            sum(losses).backward()  # type: ignore[attr-defined]
        elif way == "forwards_inside_no_sync_but_one":
            with wrapped.no_sync():
                losses = [_loss(wrapped, step, rank) for step in range(2)]
            (sum(losses) + _loss(wrapped, 2, rank)).backward()  # type: ignore[union-attr]
        elif way == "backwards":
            for step in range(3):
                _loss(wrapped, step, rank).backward()
        else:
            total = sum(_loss(wrapped, step, rank) for step in range(3))
            total.backward(retain_graph=True)  # type: ignore[union-attr]
        seen.append(_grads(wrapped))
    return seen


WAYS = ["no_sync", "forwards", "forwards_inside_no_sync_but_one", "backwards", "retained"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"batched_grad_copy": True}],
    ids=["copies", "views", "static", "batched"],
)
def test_accumulated_gradients_are_the_mean_of_the_sums(way: str, options: dict[str, Any]) -> None:
    results = run_ranks(2, accumulated, way, options)
    expected = _mean_grads("gpt", 2, [0, 1, 2])
    for rank, seen in enumerate(results):
        for grads, first in zip(seen, results[0], strict=True):
            for got, want, same in zip(grads, expected, first, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
                assert torch.equal(got, same), f"rank {rank} differs from rank 0"


def local_only(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    with wrapped.no_sync():
        _loss(wrapped, 0, rank).backward()
    alone = make("mlp")
    _loss(alone, 0, rank).backward()
    assert all(torch.equal(a, b) for a, b in zip(_grads(wrapped), _grads(alone), strict=True))
    assert wrapped.stats().num_steps == 0


def test_no_sync_skips_reduction_until_the_first_backward_outside() -> None:
    run_ranks(2, local_only)


def backward_inside_but_forward_outside(rank: int, world: int) -> int:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    loss = _loss(wrapped, 0, rank)
    with wrapped.no_sync():
        loss.backward()
    return wrapped.stats().num_steps


def test_the_forward_decides_whether_its_backward_is_reduced() -> None:
    assert run_ranks(2, backward_inside_but_forward_outside) == [1, 1]


def second_backward_of_a_retained_graph(rank: int, world: int) -> list[torch.Tensor]:
    wrapped = phalanx.DistributedDataParallel(make("mlp"), bucket_cap_mb=0.001)
    loss = _loss(wrapped, 0, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    return _grads(wrapped)


def test_a_second_backward_is_reduced_too() -> None:
    results = run_ranks(2, second_backward_of_a_retained_graph)
    for got, want in zip(results[0], _mean_grads("mlp", 2, [0, 0]), strict=True):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def unused_in_last_microbatch(rank: int, world: int) -> torch.Tensor:
    model = make("experts")
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore", bucket_cap_mb=0.0001)
    with wrapped.no_sync():
        model.forced = 0
        _loss(wrapped, 0, rank).backward()
    model.forced = 1
    _loss(wrapped, 1, rank).backward()
    return model.experts[0].weight.grad.clone()


def test_what_only_an_unreduced_microbatch_used_is_reduced_later() -> None:
    results = run_ranks(2, unused_in_last_microbatch)
    alone = make("experts")
    alone.forced = 0
    for rank in range(2):
        (_loss(alone, 0, rank) / 2).backward()
    torch.testing.assert_close(results[0], alone.experts[0].weight.grad)
    assert torch.equal(results[0], results[1])


def same_gradient_objects(rank: int, world: int, views: bool) -> None:
    wrapped = phalanx.DistributedDataParallel(make("mlp"), gradient_as_bucket_view=views)
    _loss(wrapped, 0, rank).backward()
    _loss(wrapped, 1, rank).backward()
    held = [param.grad for param in wrapped.parameters()]
    wrapped.zero_grad(set_to_none=False)
    _loss(wrapped, 2, rank).backward()
    assert all(param.grad is before for param, before in zip(wrapped.parameters(), held, strict=True))
    inside = {grad.untyped_storage().data_ptr() for grad in held}
    flats = {bucket.flat.untyped_storage().data_ptr() for bucket in wrapped.reducer.buckets}
    assert (inside <= flats) == views, "gradients are the bucket's memory exactly when asked for"


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_zero_grad_without_none_keeps_the_gradient_tensors(views: bool) -> None:
    run_ranks(2, same_gradient_objects, views)


def backward_that_raises(rank: int, world: int) -> list[torch.Tensor]:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for step in range(2):
        wrapped.zero_grad()
        _loss(wrapped, step, rank).backward()
    handle = model[1].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    with pytest.raises(ValueError, match="on purpose"):
        _loss(wrapped, 2, rank).backward()
    handle.remove()
    wrapped.zero_grad()
    _loss(wrapped, 3, rank).backward()
    return _grads(wrapped)


def test_a_backward_that_raises_on_all_ranks_can_be_followed_by_another() -> None:
    results = run_ranks(2, backward_that_raises)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
