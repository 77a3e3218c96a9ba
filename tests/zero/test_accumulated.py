"""What an optimizer holds between two events: means that wait for more, parameters that others still read, buffers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

import phalanx
from phalanx.comm import hooks
from phalanx.zero import ZeroRedundancyOptimizer, hook_with_zero_step
from phalanx.zero.partition import element
from tests.cluster import run_ranks
from tests.ddp.by_hand import unwrapped
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients
from tests.zero.test_overlap import Breaking, Fragile, made

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def break_between(rank: int, world: int, options: dict[str, Any]) -> None:
    """A mean waits for another; the backward between the two breaks before it reaches the first layer."""
    Breaking.armed = False
    torch.manual_seed(5)
    model = Fragile()
    plain = unwrapped(model)
    wrapped, zero = made(model, optim.SGD, step_in_backward=False, **options)
    for step in range(3):
        zero.zero_grad()
        _loss(wrapped, 3 * step, rank).backward()
        Breaking.armed = True
        with pytest.raises(ArithmeticError):
            _loss(wrapped, 3 * step + 1, rank).backward()
        Breaking.armed = False
        for layer in model.layers[1:]:
            layer.zero_grad()
        _loss(wrapped, 3 * step + 2, rank).backward()
        plain.zero_grad()
        for number in (3 * step, 3 * step + 2):
            for each in range(world):
                (_loss(plain, number, each) / world).backward()
            if number == 3 * step:
                for layer in plain.layers[1:]:
                    layer.zero_grad()
        zero.step()
        with torch.no_grad():
            for param in plain.parameters():
                param.sub_(0.01 * param.grad)  # type: ignore[operator]
        for name, param in model.named_parameters():
            torch.testing.assert_close(param, plain.get_parameter(name), rtol=1e-5, atol=1e-7, msg=f"step {step}: {name}")


@pytest.mark.parametrize("options", [{}, {"stage": 2}], ids=str)
def test_a_mean_that_waits_for_another_outlives_a_broken_backward(options: dict[str, Any]) -> None:
    run_ranks(2, break_between, options)


def change_reduction(rank: int, world: int) -> list[Any]:
    """Between two backwards of one step the buckets are made anew, for another way to reduce."""
    plain_model, model = Given(), Given()
    plain = optim.AdamW(plain_model.parameters(), lr=0.01)
    wrapped, zero = made(model, step_in_backward=False)
    found = []
    for update in range(3):
        params = list(plain_model.parameters())
        means = [mean_gradients(plain_model, 3 * update + micro) for micro in range(2)]
        set_gradients(params, [a + b for a, b in zip(*means, strict=True)])  # type: ignore[operator]
        plain.step()
        zero.zero_grad()
        for micro in range(2):
            if (update, micro) == (1, 1):
                wrapped.register_comm_hook(None, hook_with_zero_step(hooks.allreduce_hook, wrapped, zero))
            wrapped(own_gradients(model, 3 * update + micro, rank, world)).backward()
        zero.step()
        found.append(differing(model, sample(plain_model)))
    return found


def test_a_mean_that_waits_for_another_moves_to_new_buckets() -> None:
    assert run_ranks(2, change_reduction) == [[[]] * 3] * 2


def read_while_another_steps(rank: int, world: int) -> bool:
    """Rank 1 still computes with the one copy of the parameters when rank 0 asks for the step."""
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, shared_parameters=True, lr=0.1)
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    before = sample(model)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    unchanged = not differing(model, before)
    zero.step()
    return unchanged or rank == 0


def test_shared_parameters_change_only_when_every_rank_is_at_its_step() -> None:
    assert run_ranks(2, read_while_another_steps) == [True, True]


def gather_many(rank: int, world: int, views: bool) -> list[Any]:
    """More buckets of one dtype than there are buffers to gather through."""
    plain_model, model = Given(), Given()
    plain = optim.AdamW(plain_model.parameters(), lr=0.01)
    cap, element.CAP_BYTES = element.CAP_BYTES, 300
    try:
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01, parameters_as_bucket_view=views)
        wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
        found = []
        for step in range(3):
            set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
            plain.step()
            zero.zero_grad()
            wrapped(own_gradients(model, step, rank, world)).backward()
            zero.step()
            found.append(differing(model, sample(plain_model)))
    finally:
        element.CAP_BYTES = cap
    assert len(zero._sharded.partition.shards) > 4, "as many buckets as the test is about"
    return found


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("views", [False, True])
def test_more_buckets_are_gathered_than_there_are_buffers(views: bool, backend: str) -> None:
    assert run_ranks(2, gather_many, views, backend=backend) == [[[]] * 3] * 2
