"""Uneven inputs: ranks that run out early, both ways of dividing, hooks, buffers and early termination."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import phalanx
from phalanx.comm.hooks import allreduce_hook
from tests.cluster import run_ranks
from tests.ddp.zoo import batch, make, prediction

pytestmark = pytest.mark.covering(1)


def uneven(
    rank: int, world: int, name: str, wrapper: str, counts: list[int], by_initial: bool, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = make(name)
    kind = phalanx.DistributedDataParallel if wrapper == "phalanx" else nn.parallel.DistributedDataParallel
    hook = options.pop("hook", False)
    accumulate = options.pop("accumulate", False)
    wrapped = kind(model, bucket_cap_mb=0.001, **options)
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with wrapped.join(divide_by_initial_world_size=by_initial):
        for step in range(counts[rank]):
            x, y = batch(step, rank)
            if accumulate and step % 2 == 0:
                with wrapped.no_sync():
                    nn.functional.mse_loss(prediction(wrapped(x)), y).backward()
                continue
            nn.functional.mse_loss(prediction(wrapped(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("by_initial", [True, False], ids=["initial world", "live ranks"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("counts", [[1, 3, 5], [4, 2, 0], [3, 3, 3]], ids=str)
def test_uneven_inputs_train_as_torch_does(name: str, counts: list[int], by_initial: bool) -> None:
    ours = run_ranks(3, uneven, name, "phalanx", counts, by_initial, {})
    theirs = run_ranks(3, uneven, name, "torch", counts, by_initial, {})
    for key, value in ours[0].items():
        assert all(torch.equal(value, other[key]) for other in ours), f"ranks differ in {key}"
        torch.testing.assert_close(value, theirs[0][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"hook": True}, {"accumulate": True}],
    ids=["views", "static", "hook", "accumulation"],
)
def test_uneven_inputs_work_with_every_way_of_reducing(options: dict[str, Any]) -> None:
    plain = {"accumulate": True} if "accumulate" in options else {}
    results = run_ranks(2, uneven, "mlp", "phalanx", [2, 5], True, dict(options))
    expected = run_ranks(2, uneven, "mlp", "torch", [2, 5], True, dict(plain))
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key])
        torch.testing.assert_close(value, expected[0][key], rtol=1e-4, atol=1e-6)


def uneven_sparse_and_unused(rank: int, world: int) -> dict[str, torch.Tensor]:
    models = [make("sparse"), make("experts")]
    wrapped = [phalanx.DistributedDataParallel(model, on_unused="ignore", bucket_cap_mb=0.0002) for model in models]
    with Join(wrapped):
        for step in range(1 + 2 * rank):
            x, y = batch(step, rank)
            for one in wrapped:
                nn.functional.mse_loss(one(x), y).backward()
            with torch.no_grad():
                for param in (param for model in models for param in model.parameters()):
                    if param.grad is not None:
                        param.sub_(0.05 * param.grad.to_dense())
                        param.grad = None
    return {f"{i}.{k}": v.clone() for i, model in enumerate(models) for k, v in model.state_dict().items()}


def test_two_wrappers_join_at_once_with_sparse_and_unused_parameters() -> None:
    results = run_ranks(3, uneven_sparse_and_unused)
    for key, value in results[0].items():
        assert all(torch.equal(value, other[key]) for other in results), key


def moved_before(rank: int, world: int, how: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    wrapped = phalanx.DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    wrapped.zero_grad()
    if how == "module":
        model.double()
    else:
        for param in model.parameters():
            param.grad_dtype = torch.float64
    with wrapped.join():
        for _ in range(rank):
            wrapped(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()
    assert model.weight.grad is not None or rank == 0
    return torch.zeros(0) if model.weight.grad is None else model.weight.grad


@pytest.mark.parametrize("how", ["module", "gradients"])
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_without_inputs_follows_a_change_of_dtype(how: str, backend: str) -> None:
    grad = run_ranks(2, moved_before, how, backend=backend)[1]
    assert torch.equal(grad, torch.ones(3, 4, dtype=torch.float64)), "2, divided by two ranks"


def throwing(rank: int, world: int) -> int:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    done = 0
    with pytest.raises(RuntimeError), wrapped.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            x, y = batch(step, rank)
            nn.functional.mse_loss(wrapped(x), y).backward()
            done += 1
    return done


def test_early_termination_raises_on_every_rank() -> None:
    assert run_ranks(2, throwing) == [2, 2]


def disabled(rank: int, world: int) -> int:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    with wrapped.join(enable=False):
        for step in range(3):
            x, y = batch(step, rank)
            nn.functional.mse_loss(wrapped(x), y).backward()
    return wrapped.stats().num_steps


def test_a_disabled_join_changes_nothing() -> None:
    assert run_ranks(2, disabled) == [3, 3]


def with_evaluations(rank: int, world: int, evaluates: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    wrapped = phalanx.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with wrapped.join():
        for step in range(1 + 2 * rank):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and rank:
                with torch.no_grad():
                    wrapped.eval()(x)
                wrapped.train()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_an_evaluation_inside_join_is_each_ranks_own_affair() -> None:
    results = [run_ranks(2, with_evaluations, evaluates) for evaluates in (True, False)]
    for key, value in results[0][0].items():
        assert all(torch.equal(value, other[key]) for result in results for other in result), key
