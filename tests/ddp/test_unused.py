"""Parameters that some ranks, or all, do not use: right without any flag, and said once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import phalanx
from phalanx.comm.hooks import allreduce_hook
from tests.cluster import run_ranks
from tests.ddp.by_hand import Net, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths
from tests.ddp.zoo import Experts, batch

pytestmark = pytest.mark.covering(1)


def _step(wrapped: nn.Module, rank: int, step: int) -> None:
    x, y = batch(step, rank)
    nn.functional.mse_loss(wrapped(x), y).backward()


def grads_with_experts(rank: int, world: int, views: bool, choices: list[list[int]]) -> list[list[torch.Tensor | None]]:
    """The gradients after each step in which rank r is forced to expert choices[step][r]."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Experts()
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=0.0002)
    seen = []
    for step, choice in enumerate(choices):
        wrapped.zero_grad()
        model.forced = choice[rank]
        _step(wrapped, rank, step)
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


def grads_alone(choices: list[list[int]]) -> list[list[torch.Tensor | None]]:
    torch.manual_seed(0)
    model = Experts()
    seen = []
    for step, choice in enumerate(choices):
        model.zero_grad()
        for rank, expert in enumerate(choice):
            model.forced = expert
            x, y = batch(step, rank)
            (nn.functional.mse_loss(model(x), y) / len(choice)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_unused_here_gets_the_mean_and_unused_everywhere_stays_none(views: bool) -> None:
    choices = [[0, 1, 0], [1, 1, 1], [2, 0, 2], [0, 0, 0], [2, 1, 0]]
    ours = run_ranks(3, grads_with_experts, views, choices)
    expected = grads_alone(choices)
    for rank in range(3):
        for step in range(len(choices)):
            for got, want in zip(ours[rank][step], expected[step], strict=True):
                assert (got is None) == (want is None), f"rank {rank} step {step}"
                if got is not None and want is not None:
                    torch.testing.assert_close(got, want)


def unused_keeps_old_gradient(rank: int, world: int, views: bool) -> None:
    torch.manual_seed(0)
    model = Experts()
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, on_unused="ignore")
    model.forced = 0
    _step(wrapped, rank, 0)
    kept = model.experts[0].weight.grad
    assert kept is not None
    before = kept.clone()
    model.forced = 1  # expert 0 is used by nobody now, and its gradient has not been zeroed
    _step(wrapped, rank, 1)
    assert torch.equal(model.experts[0].weight.grad, before)
    mine = torch.full_like(before, float(rank))  # a gradient of the rank's own, that nobody touches
    model.experts[3].weight.grad = mine.clone()
    _step(wrapped, rank, 2)
    assert torch.equal(model.experts[3].weight.grad, mine)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_unused_everywhere_keeps_its_gradient_to_the_bit(views: bool) -> None:
    run_ranks(3, unused_keeps_old_gradient, views)


def warnings_of_unused(rank: int, world: int) -> list[str]:
    model = Experts()
    wrapped = phalanx.DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model.forced = step % 2
            _step(wrapped, rank, step)
    return [str(warning.message) for warning in caught]


def test_unused_parameters_are_named_in_one_warning() -> None:
    for rank, messages in enumerate(run_ranks(2, warnings_of_unused)):
        assert len(messages) == 1
        assert f"rank {rank}" in messages[0] and "'experts.3.weight'" in messages[0]
        assert "find_unused_parameters=True" in messages[0]


def raise_on_unused(rank: int, world: int) -> str:
    model = Experts()
    model.forced = 0
    wrapped = phalanx.DistributedDataParallel(model, on_unused="raise")
    with pytest.raises(phalanx.PhalanxError, match=r"experts\.3\.weight") as raised:
        _step(wrapped, rank, 0)
    return str(raised.value)


def test_unused_parameters_raise_on_every_rank_when_told_to() -> None:
    run_ranks(2, raise_on_unused)


def skip_unused(rank: int, world: int) -> tuple[int, int]:
    model = Experts()
    model.forced = 0
    wrapped = phalanx.DistributedDataParallel(model, skip_all_reduce_unused_params=True, on_unused="ignore")
    before = sum(bucket.num_bytes for bucket in wrapped.plan.buckets)
    for step in range(3):
        wrapped.zero_grad()
        _step(wrapped, rank, step)
    assert model.experts[1].weight.grad is None
    after = sum(bucket.num_bytes for bucket in wrapped.plan.buckets)
    model.forced = 1
    with pytest.raises(phalanx.PhalanxError, match=r"experts\.1\.\w+.*skip_all_reduce_unused_params"):
        _step(wrapped, rank, 3)
    return before, after


def test_skipping_unused_parameters_sends_less_and_refuses_a_change() -> None:
    for before, after in run_ranks(2, skip_unused):
        assert after <= before / 2


def skip_unused_by_another_way(rank: int, world: int, way: str) -> None:
    model = Experts()
    model.forced = 0
    options = {"skip_all_reduce_unused_params": True, "static_graph": True, "on_unused": "ignore"}
    wrapped = phalanx.DistributedDataParallel(model, **options)
    _step(wrapped, rank, 0)
    if way == "hook":
        wrapped.register_comm_hook(None, allreduce_hook)
    elif way == "optimizer":
        overlapped = {"lr": 0.1, "overlap_with_ddp": True}
        phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **overlapped).let_go()
    else:
        wrapped.reducer.resume(wrapped.plan, wrapped.reducer.learnt.memory)
    model.forced = 1
    with pytest.raises(phalanx.PhalanxError, match=r"experts\.1\.\w+.*skip_all_reduce_unused_params"):
        _step(wrapped, rank, 1)


@pytest.mark.parametrize("way", ["hook", "optimizer", "plan"])
def test_a_parameter_that_was_skipped_is_refused_however_gradients_are_reduced_later(way: str) -> None:
    run_ranks(2, skip_unused_by_another_way, way)


class InParts(nn.Module):
    """The first part is used by nobody, the others by name."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.a, self.b = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, parts: str) -> torch.Tensor:
        return sum(getattr(self, part)(x.to(self.a.weight.dtype)) for part in parts)  # type: ignore[return-value]


def local_gradients_of_others_by_number(rank: int, world: int) -> None:
    """Gradients of no_sync() that wait while the parameter that was left out comes back into the plan."""
    model = InParts()
    wrapped = phalanx.DistributedDataParallel(model, skip_all_reduce_unused_params=True, on_unused="ignore")
    x = torch.full((2, 3), float(rank + 1))
    wrapped(x, "ab").sum().backward()
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped(x, "ab").sum().backward()
    model.double()
    wrapped(x, "a").sum().backward()
    # Two samples of 1 on the one rank and of 2 on the other, twice for `a`.
    for param, mean in ((model.a.weight, 6.0), (model.b.weight, 3.0)):
        assert param.grad is not None and torch.equal(param.grad, torch.full_like(param, mean))


def test_local_gradients_are_averaged_when_a_parameter_that_was_skipped_is_back() -> None:
    run_ranks(2, local_gradients_of_others_by_number)


def frozen_after_wrapping(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    _step(wrapped, rank, 0)
    wrapped.zero_grad()
    model[0].requires_grad_(False)
    _step(wrapped, rank, 1)
    assert model[0].weight.grad is None and model[1].weight.grad is not None


def test_a_parameter_frozen_after_wrapping_counts_as_unused() -> None:
    run_ranks(2, frozen_after_wrapping)


def said_of_frozen(rank: int, world: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    wrapped = phalanx.DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            wrapped.zero_grad()
            _step(wrapped, rank, step)
            model[0].requires_grad_(False)
    return [str(warning.message) for warning in caught if "no rank used" in str(warning.message)]


def test_who_froze_a_parameter_is_not_told_to_freeze_it() -> None:
    assert run_ranks(2, said_of_frozen) == [[], []]


def unfrozen_after_wrapping(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].bias.requires_grad_(False)
    wrapped = phalanx.DistributedDataParallel(model)
    _step(wrapped, rank, 0)
    model[0].bias.requires_grad_(True)
    with pytest.raises(phalanx.PhalanxError, match=r"'0\.bias' was frozen .* before wrapping"):
        _step(wrapped, rank, 1)


def test_a_parameter_unfrozen_after_wrapping_is_refused() -> None:
    run_ranks(2, unfrozen_after_wrapping)


def frozen_early(rank: int, world: int, width: int, when: str) -> None:
    """After wrapping, and before the first backward has ended: its hook must not be asked for again."""
    model = Net(width)
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore", bucket_cap_mb=0.05)
    plain = unwrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        if when == "before the first forward":
            model.a.bias.requires_grad_(False)
        loss = wrapped(inputs(step, rank, width)).square().mean()
        model.a.bias.requires_grad_(False)
        loss.backward()
        plain.a.bias.requires_grad_(False)
        expected = mean_by_hand(plain, world, lambda m, r, step=step: m(inputs(step, r, width)).square().mean())
        assert_mean(model, expected)


@everywhere
@widths
@pytest.mark.parametrize("when", ["before the first forward", "before the first backward"])
def test_a_parameter_may_be_frozen_before_the_first_backward(when: str, width: int, backend: str) -> None:
    run_ranks(2, frozen_early, width, when, backend=backend)
