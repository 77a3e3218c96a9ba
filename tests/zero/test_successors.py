"""What comes after an optimizer that stepped in backward: another backward, another wrapper, another optimizer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


def make_another_before_the_step(rank: int, world: int, options: dict[str, Any]) -> None:
    model, alone, wrapped, zero = trained(0, {"step_in_backward": False, **options})
    for num_steps in (1, 2):  # the first backward is observed: another one comes to slices by another way
        for number in range(num_steps):
            zero.zero_grad()
            loss(wrapped).backward()
            if number < num_steps - 1:
                zero.step()
                step_alone(alone)
        kept = zero
        zero = phalanx.ZeroRedundancyOptimizer(
            model.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1, step_in_backward=False, **options
        )
        for use in (zero.step, partial(zero.clip_grad_norm_, 1.0), lambda: loss(wrapped).backward()):
            with pytest.raises(RuntimeError, match="is in slices of another ZeroRedundancyOptimizer"):
                use()
        assert_alike(model, alone)
        # Zeroed, they are zeros to whoever steps: with a plain optimizer, too, such a step changes nothing here.
        zero.zero_grad(set_to_none=False)
        zero.step()
        assert_alike(model, alone)
        del kept


@pytest.mark.parametrize("options", [{}, {"stage": 2}], ids=["stage 1", "stage 2"])
def test_slices_that_wait_for_another_optimizer_are_not_lost_in_silence(options: dict[str, Any]) -> None:
    run_ranks(2, make_another_before_the_step, options)


def use_the_first_wrapper(rank: int, world: int, options: dict[str, Any]) -> None:
    model, alone, wrapped, zero = trained(3, options)
    latest = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="this wrapper was left by its ZeroRedundancyOptimizer"):
        loss(wrapped).backward()
    zero.zero_grad()
    loss(latest).backward()
    zero.step()
    step_alone(alone)
    assert_alike(model, alone)
    # Whom nobody needs any more, nobody refuses.
    zero.let_go()
    model.zero_grad()
    loss(wrapped).backward()
    for param in model.parameters():
        assert param.grad is not None


@ways
def test_a_wrapper_that_was_left_for_a_later_one_is_not_trained_with(options: dict[str, Any]) -> None:
    run_ranks(2, use_the_first_wrapper, options)


def use_an_earlier_optimizer(rank: int, world: int) -> None:
    """Which still has the slices of its last backward, by which it would step."""
    model, alone, wrapped, zero = trained(0, {"step_in_backward": False})
    for _ in range(2):
        zero.zero_grad()
        loss(wrapped).backward()
        zero.step()
        step_alone(alone)
    latest = phalanx.ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1, step_in_backward=False
    )
    zero.zero_grad()
    loss(wrapped).backward()
    with pytest.raises(ValueError, match="another optimizer has been made"):
        zero.step()
    latest.step()
    step_alone(alone)
    assert_alike(model, alone)


def test_an_optimizer_whose_wrapper_works_for_another_one_does_not_step() -> None:
    run_ranks(2, use_an_earlier_optimizer)


def change_used_gradients(rank: int, world: int, options: dict[str, Any]) -> None:
    changes: list[Callable[[nn.Module], Any]] = [
        lambda model: [param.grad.add_(torch.ones_like(param)) for param in model.parameters()],  # type: ignore[union-attr]
        lambda model: [setattr(param, "grad", torch.ones_like(param)) for param in model.parameters()],
    ]
    for change in changes:
        model, alone, wrapped, zero = trained(2, options)
        zero.zero_grad()
        loss(wrapped).backward()
        change(model)
        with pytest.raises(RuntimeError, match="was changed after backward had made the step"):
            zero.step()
        step_alone(alone)
        assert_alike(model, alone)


@pytest.mark.parametrize("options", [{}, {"partition": "parameter"}], ids=["element", "parameter"])
def test_a_gradient_changed_after_it_made_an_update_is_not_ignored(options: dict[str, Any]) -> None:
    run_ranks(2, change_used_gradients, options)


def add_to_markers(rank: int, world: int) -> None:
    model, _, wrapped, _zero = trained(0, {"step_in_backward": False})
    loss(wrapped).backward()
    param = next(model.parameters())
    adds: list[Callable[[Any], Any]] = [
        lambda grad: grad.add_(param.detach(), alpha=0.1),
        lambda grad: grad.add_(0.1),
        lambda grad: grad.add_(param[0, 0]),
    ]
    for add in adds:
        with torch.no_grad(), pytest.raises(RuntimeError, match="each rank has only its own slice"):
            add(param.grad)


def test_to_a_scattered_gradient_only_whole_gradients_are_added() -> None:
    run_ranks(2, add_to_markers)


def change_gradients_amid_backward(rank: int, world: int, options: dict[str, Any], change: Callable[[Any], Any]) -> None:
    model, _, wrapped, zero = trained(2, options)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in model.parameters():
            change(param)

    zero.register_step_pre_hook(hook)
    before = [param.detach().clone() for param in model.parameters()]
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="step_in_backward=False"):
        loss(wrapped).backward()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


def halve(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def free(param: torch.Tensor) -> None:
    param.grad = None


@pytest.mark.parametrize("options", WAYS[:2], ids=["element", "stage 2"])
@pytest.mark.parametrize("change", [halve, free])
def test_a_step_hook_that_changes_gradients_amid_backward_is_told(options: dict[str, Any], change: Any) -> None:
    run_ranks(2, change_gradients_amid_backward, options, change)


def wrapped_in_other_precisions(rank: int, world: int, options: dict[str, Any]) -> None:
    model, alone, _, zero = trained(3, options)
    for precision in (phalanx.MixedPrecision(reduce_dtype=torch.float64), None):
        wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001, mixed_precision=precision)
        for _ in range(3):
            zero.zero_grad()
            loss(wrapped).backward()
            zero.step()
            step_alone(alone)
            assert_alike(model, alone)


@ways
def test_an_optimizer_goes_on_with_a_wrapper_of_another_precision(options: dict[str, Any]) -> None:
    run_ranks(2, wrapped_in_other_precisions, options)
