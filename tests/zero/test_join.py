"""Uneven inputs: ranks that have run out go on stepping their part until the last one is done."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import phalanx
from phalanx.errors import ConfigError
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 4))


def train(rank: int, world: int, kind: str, options: dict[str, Any], initial: bool) -> list[torch.Tensor]:
    model = build()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    one: Any
    if kind == "plain":
        one, joined = optim.Adam(model.parameters(), lr=0.01), [wrapped]
    else:
        one = ZeroRedundancyOptimizer(
            model.parameters(), optim.Adam, overlap_with_ddp=kind == "overlapped", lr=0.01, **options
        )
        joined = [wrapped, one]
    with Join(joined, divide_by_initial_world_size=initial):
        for step in range(3 + 2 * rank):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            one.zero_grad()
            if step == 1:
                with wrapped.no_sync():
                    wrapped(x).square().mean().backward()
                continue
            wrapped(x).square().mean().backward()
            one.step()
    if kind == "alone" and rank == 0:
        # Who has joined is given means for the others' steps only: a loop that follows would add to them.
        assert all(param.grad is None for param in model.parameters())
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("initial", [True, False], ids=["initial world", "those still training"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("alone", {}),
        ("alone", {"partition": "parameter"}),
        ("overlapped", {}),
        ("overlapped", {"stage": 2}),
        ("overlapped", {"step_in_backward": False}),
        ("overlapped", {"partition": "parameter"}),
    ],
    ids=str,
)
def test_uneven_inputs_train_as_with_the_plain_optimizer(kind: str, options: dict[str, Any], initial: bool) -> None:
    # Two ranks: their sums have one order, so that equal means bit for bit.
    expected = run_ranks(2, train, "plain", {}, initial)[1]
    for found in run_ranks(2, train, kind, options, initial):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["alone", "overlapped"])
def test_three_ranks_through_shared_memory_end_equal(kind: str) -> None:
    expected = run_ranks(3, train, "plain", {}, True, backend="phalanx")[2]
    for found in run_ranks(3, train, kind, {}, True, backend="phalanx"):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)


class SometimesUsed(nn.Module):
    """`early`, a small and a large layer (more than 64 KiB), is used in the first steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(8, 50)
        self.early = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2500)])

    def forward(self, x: torch.Tensor, early: bool) -> torch.Tensor:
        losses = [self.always(x).square().mean()]
        if early:
            losses += [layer(x).square().mean() for layer in self.early]
        return torch.stack(losses).sum()


def use_early(rank: int, world: int, kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Rank 0 has inputs for two steps, in which `early` is used; the others go on without it."""
    model = SometimesUsed()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.05, on_unused="ignore")
    one: Any
    if kind == "plain":
        one, joined = optim.Adam(model.parameters(), lr=0.01), [wrapped]
    else:
        one = ZeroRedundancyOptimizer(
            model.parameters(), optim.Adam, overlap_with_ddp=kind == "overlapped", lr=0.01, **options
        )
        joined = [wrapped, one]
    with Join(joined):
        for step in range(2 if rank == 0 else 5):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            one.zero_grad()
            wrapped(x, step < 2).backward()
            one.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("alone", {}),
        ("alone", {"stage": 2}),
        ("alone", {"partition": "parameter"}),
        ("overlapped", {}),
        ("overlapped", {"step_in_backward": False}),
        ("overlapped", {"partition": "parameter"}),
    ],
    ids=str,
)
def test_a_rank_that_has_just_joined_does_not_step_with_its_last_gradients(
    kind: str, options: dict[str, Any], backend: str
) -> None:
    expected = run_ranks(2, use_early, "plain", {}, backend=backend)[1]
    for found in run_ranks(2, use_early, kind, options, backend=backend):
        assert all(map(torch.equal, found, expected))


def follow(rank: int, world: int, kind: str, options: dict[str, Any], when: str) -> list[torch.Tensor]:
    """Rank 0 has inputs for two steps; the learning rate and a beta change with every step of the others."""
    model = build()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    rate = torch.tensor(0.01) if when == "as a tensor" else 0.01
    one: Any
    if kind == "plain":
        one, joined = optim.Adam(model.parameters(), lr=rate), [wrapped]
    else:
        one = ZeroRedundancyOptimizer(
            model.parameters(), optim.Adam, overlap_with_ddp=kind == "overlapped", lr=rate, **options
        )
        joined = [wrapped, one]
    scheduler = optim.lr_scheduler.ExponentialLR(one, 0.7)
    with Join(joined):
        for step in range(2 if rank == 0 else 5):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            one.zero_grad()
            loss = wrapped(x).square().mean()
            if when == "before backward":
                one.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)
            loss.backward()
            if when == "before step":
                one.param_groups[0]["lr"] = 0.01 / (1 + step)
            one.step()
            if when not in ("before step", "never"):
                scheduler.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    ("kind", "options", "when"),
    [
        ("alone", {}, "after step"),
        ("alone", {}, "before step"),
        ("alone", {}, "as a tensor"),
        ("alone", {"partition": "parameter"}, "before backward"),
        ("overlapped", {}, "after step"),
        ("overlapped", {}, "before backward"),
        ("overlapped", {"stage": 2}, "after step"),
        ("overlapped", {"step_in_backward": False}, "before step"),
    ],
    ids=str,
)
def test_a_joined_rank_follows_the_options_of_those_still_training(
    kind: str, options: dict[str, Any], when: str, backend: str
) -> None:
    expected, unchanged = run_ranks(2, follow, "plain", {}, when)[1], run_ranks(2, follow, "plain", {}, "never")[1]
    assert not all(map(torch.equal, expected, unchanged)), "the options matter"
    for found in run_ranks(2, follow, kind, options, when, backend=backend):
        assert all(map(torch.equal, found, expected))


def follow_numpy(rank: int, world: int, options: dict[str, Any]) -> float:
    model = build()
    wrapped = phalanx.DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, **options)
    for _ in range(2):
        with Join([wrapped, zero]):
            for step in range(2 + 3 * rank):
                if step == 3:  # which the other rank does not come to
                    zero.param_groups[0]["lr"] = np.float64(0.05)
                zero.zero_grad()
                wrapped(torch.ones(5, 8)).square().mean().backward()
                zero.step()
    return float(zero.param_groups[0]["lr"])


@pytest.mark.parametrize("options", [{}, {"overlap_with_ddp": True}], ids=["alone", "overlapped"])
def test_a_learning_rate_that_numpy_made_is_the_same_on_ranks_that_followed(options: dict[str, Any]) -> None:
    """It comes to them as a number of Python's."""
    assert run_ranks(2, follow_numpy, options) == [0.05, 0.05]


def disagree(rank: int, world: int) -> str:
    """Rank 0 has joined; of the two that still train, one changes its learning rate."""
    model = build()
    wrapped = phalanx.DistributedDataParallel(model)
    one = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
    try:
        with Join([wrapped, one]):
            for step in range(1 if rank == 0 else 4):
                one.param_groups[0]["lr"] = 0.02 if rank == 2 and step == 2 else 0.01
                wrapped(torch.ones(5, 8)).square().mean().backward()
                one.step()
                one.zero_grad()
    except phalanx.errors.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ranks_that_train_must_still_have_the_same_options(backend: str) -> None:
    for said in run_ranks(3, disagree, backend=backend):
        assert "lr of group 0" in said and "0.02" in said, said


def join_alone(rank: int, world: int) -> list[torch.Tensor]:
    """Without a wrapper nobody gives a joined rank gradients; the others step, and gather with it, all the same."""
    model = build()
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    with Join([optimizer]):
        for step in range(2 + 2 * rank):
            torch.manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_joined_rank_without_gradients_still_gathers_with_the_others(backend: str) -> None:
    first, second = run_ranks(2, join_alone, backend=backend)
    assert all(map(torch.equal, first, second))


class Mixed(nn.Module):
    """Two buckets, since parameters of two dtypes never share one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 50), nn.Linear(50, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)).double())


def freeze(rank: int, world: int, kind: str, options: dict[str, Any], freezes_at: int, keeps: bool) -> list[torch.Tensor]:
    """The head is frozen by the ranks that still train, perhaps when rank 0 has joined; its gradient is kept, or not."""
    model = Mixed()
    wrapped = phalanx.DistributedDataParallel(model, find_unused_parameters=True)
    one: Any
    if kind == "plain":
        one, joined = optim.SGD(model.parameters(), lr=0.1), [wrapped]
    else:
        one = ZeroRedundancyOptimizer(
            model.parameters(), optim.SGD, overlap_with_ddp=kind == "overlapped", lr=0.1, **options
        )
        joined = [wrapped, one]
    with Join(joined):
        for step in range(2 + 3 * rank):
            if step == freezes_at:
                model.head.requires_grad_(False)
            (model.body if keeps else model).zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            wrapped(x).square().mean().backward()
            one.step()
    return [param.detach().clone() for param in model.parameters()]


FROZEN = pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("alone", {}),
        ("alone", {"partition": "parameter"}),
        ("overlapped", {}),
        ("overlapped", {"step_in_backward": False}),
        ("overlapped", {"partition": "parameter"}),
    ],
    ids=str,
)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@FROZEN
def test_what_is_frozen_after_a_rank_has_joined_travels_no_more_on_any(
    kind: str, options: dict[str, Any], backend: str
) -> None:
    expected = run_ranks(2, freeze, "plain", {}, 3, False)[1]
    for found in run_ranks(2, freeze, kind, options, 3, False, backend=backend, timeout_s=30, pg_timeout_s=10):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@FROZEN
def test_a_gradient_that_is_kept_of_what_is_frozen_leaves_the_ranks_equal(
    kind: str, options: dict[str, Any], backend: str
) -> None:
    first, second = run_ranks(2, freeze, kind, options, 1, True, backend=backend, timeout_s=30, pg_timeout_s=10)
    assert all(map(torch.equal, first, second))


def train_two_wrappers(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    models = nn.ModuleList([nn.Linear(8, 50), nn.Linear(20, 30)])
    wrapped = [phalanx.DistributedDataParallel(model) for model in models]
    zero = ZeroRedundancyOptimizer(models.parameters(), optim.Adam, lr=0.01)
    with Join([*wrapped, zero]):
        for step in range(2 + 3 * rank):
            zero.zero_grad()
            for one, width in zip(wrapped, (8, 20), strict=True):
                x = torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))
                one(x).square().mean().backward()
            zero.step()
    return [param.detach().clone() for param in models.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_joined_rank_steps_by_the_means_of_every_wrapper(backend: str) -> None:
    torch.manual_seed(0)
    models = nn.ModuleList([nn.Linear(8, 50), nn.Linear(20, 30)])
    plain = optim.Adam(models.parameters(), lr=0.01)
    for step in range(5):
        plain.zero_grad()
        for rank in range(int(step >= 2), 2):  # the first rank has inputs for two steps
            for model, width in zip(models, (8, 20), strict=True):
                x = torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))
                (model(x).square().mean() / 2).backward()
        plain.step()
    for found in run_ranks(2, train_two_wrappers, backend=backend):
        torch.testing.assert_close(found, [param.detach() for param in models.parameters()], rtol=1e-4, atol=1e-6)


def clipping(rank: int, world: int, overlapped: bool) -> list[float]:
    wrapped = phalanx.DistributedDataParallel(build())
    options = {"overlap_with_ddp": True, "step_in_backward": False} if overlapped else {}
    one: Any = ZeroRedundancyOptimizer(wrapped.parameters(), optim.SGD, lr=0.1, **options)
    norms: list[float] = []
    refused = pytest.raises(ConfigError, match="inside join") if overlapped else contextlib.nullcontext()
    with refused, Join([wrapped, one]):
        for _ in range(1 + rank):
            one.zero_grad()
            wrapped(torch.ones(2, 8)).sum().backward()
            norms.append(float(one.clip_grad_norm_(0.5)))
            one.step()
    return norms


def test_whole_gradients_are_clipped_under_join_and_those_in_shards_refused_at_once() -> None:
    short, long = run_ranks(2, clipping, False)
    assert long[:1] == short and len(long) == 2
    assert run_ranks(2, clipping, True) == [[], []]
