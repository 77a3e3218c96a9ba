"""What a closure changes is part of its step: options are those that it leaves, and what it raises changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import phalanx
from phalanx.errors import ConfigError, ReductionError
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, sample
from tests.zero.test_usage import Pair, everyone, rosenbrock

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

LATER = {"step_in_backward": False}


def lower(optimizer: optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (1 + step)


def closures(pair: Pair, step: int, change: Callable[[optim.Optimizer, int], None]) -> tuple[Any, Any]:
    """For the plain optimizer and the sharded one: gradients, then the change."""

    def plainly() -> float:
        pair.set_plain(step)
        change(pair.plain, step)
        return 1.0

    def sharded() -> float:
        pair.zero.zero_grad()
        pair.backward(step)
        change(pair.zero, step)
        return 1.0

    return plainly, sharded


def change_in_closure(rank: int, world: int, overlapped: bool, options: dict[str, Any]) -> list[Any]:
    pair = Pair(overlapped, optim.SGD, lr=0.05, momentum=0.9, zero_options=options)
    found = []
    for step in range(4):
        for one, closure in zip(pair.optimizers, closures(pair, step, lower), strict=True):
            one.step(closure)
        found.append((differing(pair.model, sample(pair.plain_model)), pair.zero.param_groups[0]["lr"] * (1 + step)))
    return found


@everyone
@pytest.mark.parametrize(
    ("overlapped", "options"), [(False, {}), (False, {"partition": "parameter"}), (True, LATER)], ids=str
)
def test_options_changed_by_a_closure_are_those_of_its_step(
    overlapped: bool, options: dict[str, Any], backend: str
) -> None:
    results = run_ranks(2, change_in_closure, overlapped, options, backend=backend)
    assert results == [[([], 0.05)] * 4] * 2


def differ_in_closure(rank: int, world: int, partition: str) -> list[int]:
    """One rank's closure has its own idea of a learning rate: all ranks refuse, and none has stepped."""
    pair = Pair(False, optim.SGD, lr=0.05, zero_options={"partition": partition})
    before = sample(pair.model)
    _, closure = closures(pair, 0, lambda one, step: lower(one, rank))
    with pytest.raises(RuntimeError, match="lr of group 0"):
        pair.zero.step(closure)
    assert not pair.zero.is_torn
    return differing(pair.model, before)


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_ranks_whose_closures_leave_different_options_are_told_before_any_steps(partition: str) -> None:
    assert run_ranks(2, differ_in_closure, partition) == [[]] * 2


def change_too_late(rank: int, world: int, options: dict[str, Any]) -> None:
    """Backward has made the step by the time that the option is changed; changes before it or after `step()` are in time."""
    pair = Pair(True, optim.SGD, lr=0.05, zero_options=options)
    for step in range(4):
        assert pair.step(step) == []
        for one in pair.optimizers:
            lower(one, step)
    for _ in range(2):
        pair.zero.zero_grad()
        pair.backward(4)
        pair.zero.param_groups[0]["lr"] *= 0.5
        with pytest.raises(ConfigError, match=r"lr of group 0 from .*step_in_backward=False"):
            pair.zero.step()


@pytest.mark.parametrize("options", [{}, {"partition": "parameter"}], ids=str)
def test_options_changed_after_the_backward_that_stepped_are_refused(options: dict[str, Any]) -> None:
    run_ranks(2, change_too_late, options)


def step_twice(rank: int, world: int, options: dict[str, Any]) -> None:
    """Any other optimizer would step by the same gradients once more. Without gradients, it would do nothing."""
    pair = Pair(True, optim.SGD, lr=0.05, zero_options=options)
    pair.zero.step()
    for step in range(3):
        assert pair.step(step) == []
        with pytest.raises(ReductionError, match="a second time"):
            pair.zero.step()
        pair.zero.zero_grad()
        pair.zero.step()


@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"partition": "parameter"}], ids=str)
def test_a_second_step_for_one_backward_is_refused(options: dict[str, Any]) -> None:
    run_ranks(2, step_twice, options)


class Stopped(Exception):
    """Raised by a closure."""


def raise_in_closure(rank: int, world: int, make: Any, options: dict[str, Any]) -> list[Any]:
    """Every rank's closure raises at one of its calls; the next steps are as if that one had not been asked for."""
    shapes = ((3,), (2, 2), (5,))
    models = [Given(shapes), Given(shapes)]
    plain, zero = make(models[0].parameters(), **options), ZeroRedundancyOptimizer(models[1].parameters(), make, **options)
    found = []
    for stops_at in (None, 1, None, 2 if make is optim.LBFGS else 1, None):
        for model, one in zip(models, (plain, zero), strict=True):
            calls = 0

            def closure(model: nn.Module = model, one: optim.Optimizer = one, stops_at: int | None = stops_at) -> Any:
                nonlocal calls
                calls += 1
                if calls == stops_at:
                    raise Stopped
                one.zero_grad()
                loss = rosenbrock(model)
                loss.backward()
                return loss

            try:
                one.step(closure)
            except Stopped:
                assert stops_at is not None
        found.append(differing(models[1], sample(models[0])))
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [(optim.Adam, {"lr": 0.01}), (optim.Adafactor, {"lr": 0.01}), (optim.LBFGS, {"lr": 0.5, "max_iter": 4})],
)
def test_what_a_closure_raises_leaves_parameters_whole(make: Any, options: dict[str, Any]) -> None:
    assert run_ranks(2, raise_in_closure, make, options) == [[[]] * 5] * 2


def join_with_closures(rank: int, world: int) -> list[Any]:
    """Rank 1 has two inputs more. Its options change in its closures; the other rank follows."""
    model = Given(((70,), (33, 9)))
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.05)
    with Join([wrapped, zero]):
        for step in range(2 + 2 * rank):

            def closure(step: int = step) -> Any:
                zero.zero_grad()
                loss = wrapped([param.detach().sign() for param in model.parameters()])
                loss.backward()
                lower(zero, step)
                return loss

            zero.step(closure)
    return [param.detach().sum().item() for param in model.parameters()]


@everyone
def test_a_joined_rank_follows_steps_with_closures(backend: str) -> None:
    first, second = run_ranks(2, join_with_closures, backend=backend)
    assert first == second


def look_late(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, shared_parameters=True, lr=0.1)
    ddp = phalanx.DistributedDataParallel(model)
    unchanged = []

    def closure() -> float:
        zero.zero_grad()
        ddp(torch.ones(2, 64)).sum().backward()
        before = model.weight.detach().clone()
        if rank == 1:
            time.sleep(0.3)  # the other rank has its gradients, and would step by them meanwhile
        unchanged.append(torch.equal(model.weight, before))
        return 1.0

    for _ in range(2):
        zero.step(closure)
    return all(unchanged)


def test_shared_parameters_stay_as_they_are_while_another_rank_evaluates() -> None:
    """With a closure nobody votes on the step, so that nothing else holds back the rank that is first."""
    assert run_ranks(2, look_late, backend="phalanx") == [True, True]
