"""NaN and infinity are named by rank and parameter before they spread; replicas that drift apart are noticed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.ddp.passes import backward
from phalanx.errors import ConfigError, MismatchError, ReductionError
from phalanx.optim import apply_in_backward
from tests.cluster import run_ranks

pytestmark = pytest.mark.covering(1)


def _wrapped(**options: Any) -> phalanx.DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    return phalanx.DistributedDataParallel(net, bucket_cap_mb=0.0003, **options)


def _backward(wrapped: nn.Module, poison: float | None) -> None:
    """One backward; `poison` is what becomes of the gradient of the second layer's bias."""
    hooks = []
    if poison is not None:
        bias = wrapped.module[1].bias
        hooks.append(bias.register_hook(lambda grad: torch.full_like(grad, poison)))
    wrapped(torch.ones(2, 8)).square().mean().backward()
    for hook in hooks:
        hook.remove()


def found(rank: int, world: int, action: str | None, poison: float, as_views: bool) -> tuple[str, list[bool]]:
    """What is said when rank 1 has a bad gradient in its third backward, and which parameters have a gradient after it."""
    wrapped = _wrapped(on_nonfinite=action, gradient_as_bucket_view=as_views)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    said = ""
    for step in range(4):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _backward(wrapped, poison if step == 2 and rank == 1 else None)
            except ReductionError as error:
                return str(error), [p.grad is not None for p in wrapped.parameters()]
        said += " ".join(str(each.message) for each in caught)
        if step == 2:
            had = [p.grad is not None for p in wrapped.parameters()]
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in wrapped.parameters()) == (action == "skip"), "NaN spreads unless skipped"
    return said, had


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("action", ["raise", "warn", "skip"])
def test_who_has_a_bad_gradient_of_what_is_told_on_every_rank(action: str, poison: float, backend: str) -> None:
    for rank, (said, had) in enumerate(run_ranks(3, found, action, poison, poison > 0, backend=backend)):
        assert f"rank {rank}: step 2, bucket " in said and "(rank 1: '1.bias')" in said, said
        # What is left after "raise" are this rank's own, given back to it.
        assert action == "raise" or any(had) == (action == "warn")
        assert said.count("step 2") == 1 and ("step 3" in said) == (action == "warn"), "skipped, it is over"


def raise_in_one_of_two(rank: int, world: int) -> None:
    """Both wrappers have bad gradients in one backward, of which the first to see them tells."""
    first, second = _wrapped(on_nonfinite="raise"), phalanx.DistributedDataParallel(nn.Linear(4, 4), on_nonfinite="raise")
    for step in range(3):
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        for wrapped in (first, second):
            wrapped.zero_grad()
        loss = second(first(torch.ones(2, 8))).square().mean() * factor
        if step == 1:
            with pytest.raises(ReductionError, match=r"\(rank 1: '"):
                loss.backward()
            continue
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for wrapped in (first, second) for p in wrapped.parameters())


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_bad_backward_of_two_wrappers_is_told_of_once(backend: str) -> None:
    run_ranks(2, raise_in_one_of_two, backend=backend)


def test_ignored_nobody_looks() -> None:
    for said, had in run_ranks(2, found, "ignore", float("nan"), False, backend="phalanx"):
        assert said == "" and all(had)


def skipped_and_stepped(rank: int, world: int, how: str) -> str:
    wrapped = _wrapped(on_nonfinite="skip")
    if how == "in backward":
        apply_in_backward(torch.optim.SGD, wrapped.module.parameters(), lr=0.1)
    else:
        optimizer = phalanx.ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.Adam, lr=0.1, overlap_with_ddp=True, step_in_backward=how == "overlapped"
        )
        assert optimizer is not None
    with pytest.raises(ConfigError) as raised:
        _backward(wrapped, None)
    return str(raised.value)


@pytest.mark.parametrize("how", ["in backward", "overlapped", "scattered"])
def test_what_has_been_stepped_cannot_be_skipped(how: str) -> None:
    for text in run_ranks(2, skipped_and_stepped, how, backend="phalanx"):
        assert 'on_nonfinite="raise"' in text


def drifting(rank: int, world: int, every: int) -> tuple[int, str]:
    """In which backward the change of rank 1 is noticed, and in which words."""
    wrapped = _wrapped(check_drift_every=every)
    for step in range(6):
        if step == 1 and rank == 1:
            with torch.no_grad():
                wrapped.module[2].weight[0, 0] += 1e-6
        try:
            _backward(wrapped, None)
        except MismatchError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_replica_that_drifts_is_noticed(backend: str) -> None:
    for rank, (step, text) in enumerate(run_ranks(3, drifting, 3, backend=backend)):
        assert step == 2 and text.startswith(f"rank {rank}: step 2"), (step, text)
        assert "1 of 6, first '2.weight', which is another one on rank 1" in text


# -- together with other features ------------------------------------------------------------------


class Nested(nn.Module):
    """`shared` is used once, then also in a reentrant checkpoint: part of its gradient comes after its bucket has left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.nests = self.poisons = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.shared.weight
        if self.poisons and torch.is_grad_enabled():  # the first time, it is not
            weight = weight * torch.ones(())
            weight.register_hook(lambda grad: torch.full_like(grad, float("nan")))
        return torch.tanh(nn.functional.linear(x, weight, self.shared.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.inner, x, use_reentrant=True) if self.nests else x
        return self.last(self.shared(x))


def late(rank: int, world: int) -> tuple[list[str], int]:
    net = Nested()
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.0003, on_nonfinite="warn")
    said, seen = [], []
    reduce_late_part = backward.reduce_late_part
    backward.reduce_late_part = lambda run, bucket: seen.append(bucket.index) or reduce_late_part(run, bucket)
    try:
        for step in range(4):
            net.nests, net.poisons = step >= 2, step == 2 and rank == 1
            wrapped.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wrapped(torch.ones(2, 8)).square().mean().backward()
            said.append(" ".join(str(each.message) for each in caught if "NaN" in str(each.message)))
    finally:
        backward.reduce_late_part = reduce_late_part
    return said, len(seen)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_what_comes_late_is_looked_at_too(backend: str) -> None:
    for said, num_late in run_ranks(2, late, backend=backend):
        assert num_late == 1, "it came late, once"
        assert "(rank 1: 'shared.weight')" in said[2] and not (said[0] or said[1] or said[3])


def replicas_in_backward(rank: int, world: int, options: dict[str, Any]) -> str:
    """Compared after every backward, in which an optimizer steps and gathers what it stepped."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.1, check_drift_every=1)
    optimizer = phalanx.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=True, **options
    )
    for _ in range(6):
        optimizer.zero_grad()
        try:
            wrapped(torch.randn(4, 128)).square().mean().backward()
        except MismatchError as error:
            return str(error)
        optimizer.step()
    return ""


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}], ids=str)
def test_parameters_are_compared_when_backward_has_stepped_all_of_them(options: dict[str, Any], backend: str) -> None:
    assert run_ranks(3, replicas_in_backward, options, backend=backend) == [""] * 3


def overlapped_raise(rank: int, world: int) -> tuple[str, str]:
    """What is said when some buckets have been stepped and a later one is not finite; and of going on all the same."""
    wrapped = _wrapped(on_nonfinite="raise")
    optimizer = phalanx.ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    said = []
    for step in range(4):
        optimizer.zero_grad()
        poison = torch.inf if step == 2 and rank == 1 else 0.0
        handle = wrapped.module[0].bias.register_hook(lambda grad, poison=poison: grad + poison)
        try:
            _backward(wrapped, None)
        except phalanx.PhalanxError as error:
            said.append(str(error))
        handle.remove()
    return said[0], said[1] if len(said) > 1 else ""


def test_where_backward_steps_it_does_not_say_that_nothing_was_given_out() -> None:
    for first, second in run_ranks(2, overlapped_raise, backend="phalanx"):
        assert "(rank 1: '0.bias')" in first and "may have been stepped" in first and "No gradient" not in first
        assert "checkpoint" in second, "between two steps nobody trains on"


def drift_check_of_other_parameters(rank: int, world: int) -> None:
    wrapped = _wrapped(check_drift_every=1)
    if rank == 1:
        wrapped.module[0].extra = nn.Parameter(torch.ones(3))  # as an adapter that one rank alone has put in
    with pytest.raises(MismatchError, match=r"the parameters: '0\.extra' is missing on rank 0, \(3,\) on rank 1"):
        _backward(wrapped, None)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_replicas_of_other_parameters_are_told_so_and_not_compared(backend: str) -> None:
    run_ranks(2, drift_check_of_other_parameters, backend=backend)
