"""What comes after an optimizer that stepped in backward: another backward, another wrapper, another optimizer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.comm import hooks
from tests.cluster import run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

WAYS = [{}, {"stage": 2}, {"partition": "parameter"}]
ways = pytest.mark.parametrize("options", WAYS, ids=["element", "stage 2", "parameter"])


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 20)).square().mean()  # the same on all ranks: the mean is each rank's own


def trained(num_steps: int, options: dict[str, Any], hook: bool = False) -> tuple[nn.Module, nn.Module, Any, Any]:
    """A model after some steps, one trained without any wrapper, and what trained the former."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))
    alone = copy.deepcopy(model)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook:
        wrapped.register_comm_hook(None, hooks.allreduce_hook)
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1, **options)
    for _ in range(num_steps):
        zero.zero_grad()
        loss(wrapped).backward()
        step_alone(alone)
    return model, alone, wrapped, zero


def step_alone(alone: nn.Module) -> None:
    alone.zero_grad()
    loss(alone).backward()
    with torch.no_grad():
        for param in alone.parameters():
            param.sub_(0.1 * param.grad)  # type: ignore[operator]


def assert_alike(model: nn.Module, alone: nn.Module) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, alone.get_parameter(name), msg=name)


@contextmanager
def garbage_left() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def use_twice(rank: int, world: int, options: dict[str, Any], hook: bool) -> None:
    model, alone, wrapped, _ = trained(3, options, hook)
    with pytest.raises(RuntimeError, match="have not been zeroed"):
        loss(wrapped).backward()
    assert_alike(model, alone)


@pytest.mark.parametrize(
    ("options", "hook"),
    [({}, False), ({}, True), ({"partition": "parameter"}, False)],
    ids=["scattered", "hook", "parameter"],
)
def test_gradients_that_made_an_update_are_not_used_again(options: dict[str, Any], hook: bool) -> None:
    run_ranks(2, use_twice, options, hook)


def another_optimizer(rank: int, world: int) -> None:
    """The wrapper keeps the first one, which goes on stepping."""
    model, alone, wrapped, zero = trained(2, {"partition": "parameter"})
    plain = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD\.step\(\): an update has been made of these gradients during backward"):
        plain.step()
    zero.let_go()
    plain.zero_grad()
    loss(wrapped).backward()
    plain.step()
    step_alone(alone)
    assert_alike(model, alone)


def test_another_optimizer_does_not_step_what_backward_has_stepped() -> None:
    run_ranks(2, another_optimizer)


def dropped(rank: int, world: int, options: dict[str, Any]) -> None:
    with garbage_left():
        model, alone, wrapped, zero = trained(2, options)
        zero.zero_grad()
        del wrapped, zero
        if rank == 0:
            gc.collect()  # ranks free memory at other moments
        again = phalanx.DistributedDataParallel(model)
        plain = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            plain.zero_grad()
            loss(again).backward()
            plain.step()
            step_alone(alone)
        assert_alike(model, alone)


@ways
def test_an_optimizer_that_was_dropped_does_not_join_the_next_wrapper(options: dict[str, Any]) -> None:
    run_ranks(2, dropped, options)


def renewed(rank: int, world: int, options: dict[str, Any], keeps_old: bool) -> None:
    model, alone, wrapped, zero = trained(2, options)
    kept = (wrapped, zero) if keeps_old else ()
    again = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1, **options)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        loss(again).backward()
        step_alone(alone)
        assert_alike(model, alone)
    del kept


@ways
@pytest.mark.parametrize("keeps_old", [False, True], ids=["old one dropped", "old one kept"])
def test_zeroed_gradients_of_one_optimizer_are_zeros_to_the_next(options: dict[str, Any], keeps_old: bool) -> None:
    run_ranks(2, renewed, options, keeps_old)
