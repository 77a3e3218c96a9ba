"""What begins a reduction: a forward arms, the first parameter's gradient begins, seen outputs or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import phalanx
from tests.cluster import run_ranks
from tests.ddp.by_hand import Net, alike, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def _wrapped(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """A copy for the computation by hand, and the wrapper; with several buckets."""
    return unwrapped(model), phalanx.DistributedDataParallel(model, bucket_cap_mb=0.05, on_unused="ignore", **options)


def _square(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return model(inputs(step, rank, width)).square().mean()


# -- autograd.grad is no backward ------------------------------------------------------------------


def look_at_inputs(rank: int, world: int, width: int, who: tuple[int, ...]) -> int:
    """Some ranks compute a saliency map now and then: of the loss before its backward, and of a forward of its own."""
    model = Net(width)
    plain, wrapped = _wrapped(model)
    for step in range(4):
        wrapped.zero_grad()
        x = inputs(step, rank, width).requires_grad_()
        loss = wrapped(x).square().mean()
        if rank in who and step in (0, 2):
            torch.autograd.grad(loss, x, retain_graph=True)
        if rank in who and step == 3:
            torch.autograd.grad(wrapped(x).sum(), [x, *model.parameters()])
        loss.backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: _square(m, step, r, width)))
    return wrapped.stats().num_steps


@everywhere
@widths
@pytest.mark.parametrize("who", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_autograd_grad_reduces_nothing(who: tuple[int, ...], width: int, backend: str) -> None:
    assert run_ranks(2, look_at_inputs, width, who, backend=backend) == [4, 4]


def look_after_updates(rank: int, world: int, width: int, options: dict[str, Any], who: tuple[int, ...]) -> None:
    model = Net(width)
    plain, wrapped = _wrapped(model)
    zero = phalanx.ZeroRedundancyOptimizer(
        wrapped.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True, **options
    )
    by_hand = optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        zero.zero_grad()
        _square(wrapped, step, rank, width).backward()
        zero.step()
        means = mean_by_hand(plain, world, lambda m, r, step=step: _square(m, step, r, width))
        for param, mean in zip(plain.parameters(), means, strict=True):
            param.grad = None if mean is None else mean.float()
        by_hand.step()
        if rank in who:
            before = [param.detach().clone() for param in model.parameters()]
            x = inputs(50 + step, rank, width).requires_grad_()
            torch.autograd.grad(wrapped(x).sum(), x)
            assert all(map(torch.equal, before, model.parameters())), "autograd.grad has made an update"
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, want)
            assert alike(param)


@widths
@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_autograd_grad_makes_no_update(options: dict[str, Any], who: tuple[int, ...], width: int) -> None:
    run_ranks(2, look_after_updates, width, options, who)


# -- losses of which no output was seen ------------------------------------------------------------


def penalise(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    """As in WGAN-GP: made of gradients, which no output leads to."""
    x = inputs(step, rank, width).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


class KeepsLoss(nn.Module):
    """An auxiliary loss is left in an attribute; the output has nothing to do with it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net, self.head = Net(width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.net(x).square().mean()
        return self.head(x)


def auxiliary(model: Any, step: int, rank: int, width: int) -> torch.Tensor:
    model(inputs(step, rank, width))
    return model.kept


class Policy(nn.Module):
    """Returns a distribution, into which nobody can look for tensors; with `value`, a tensor beside it."""

    def __init__(self, width: int, value: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.mean = nn.Linear(width, width), nn.Linear(width, 1)
        self.value = nn.Linear(width, 1) if value else None

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        chosen = Normal(self.mean(hidden), 1.0)
        return chosen if self.value is None else (chosen, self.value(hidden))


def likelihood(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return -model(inputs(step, rank, width)).log_prob(torch.ones(4, 1)).mean()


def policy_only(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return -model(inputs(step, rank, width))[0].log_prob(torch.ones(4, 1)).mean()


UNSEEN = {
    "gradient penalty": (Net, penalise),
    "auxiliary loss": (KeepsLoss, auxiliary),
    "distribution": (Policy, likelihood),
    "distribution beside a tensor": (lambda width: Policy(width, value=True), policy_only),
}


def unseen(rank: int, world: int, width: int, case: str) -> int:
    make, loss = UNSEEN[case]
    model = make(width)
    plain, wrapped = _wrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        loss(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r, width)))
    return wrapped.stats().num_steps


@everywhere
@widths
@pytest.mark.parametrize("case", UNSEEN)
def test_a_loss_that_no_output_leads_to_is_reduced(case: str, width: int, backend: str) -> None:
    assert run_ranks(2, unseen, width, case, backend=backend) == [3, 3]


def actor_and_critic(rank: int, world: int, width: int, value_first: bool) -> None:
    """Two losses of one forward, each with a backward of its own."""

    def losses(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        chosen, value = model(inputs(step, rank, width))
        both = [-chosen.log_prob(torch.ones(4, 1)).mean(), value.square().mean()]
        return both[::-1] if value_first else both

    model = Policy(width, value=True)
    plain, wrapped = _wrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        first, second = losses(wrapped, step, rank)
        first.backward(retain_graph=True)
        second.backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: sum(losses(m, step, r))))  # type: ignore[arg-type, return-value]


@everywhere
@widths
@pytest.mark.parametrize("value_first", [True, False], ids=["value first", "policy first"])
def test_the_loss_of_an_object_is_reduced_beside_that_of_a_tensor(value_first: bool, width: int, backend: str) -> None:
    run_ranks(2, actor_and_critic, width, value_first, backend=backend)


def two_of_each(rank: int, world: int, width: int) -> int:
    model = Policy(width)
    plain, wrapped = _wrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        losses = [likelihood(wrapped, turn, rank, width) for turn in (step, step + 9)]
        for loss in losses:
            loss.backward()
        expected = mean_by_hand(
            plain,
            world,
            lambda m, r, step=step: likelihood(m, step, r, width) + likelihood(m, step + 9, r, width),
        )
        assert_mean(model, expected)
    return wrapped.stats().num_steps


@everywhere
@widths
def test_two_forwards_that_return_objects_are_followed_by_two_reduced_backwards(width: int, backend: str) -> None:
    assert run_ranks(2, two_of_each, width, backend=backend) == [6, 6]


# -- when a backward comes -------------------------------------------------------------------------


class LearnsInside(nn.Module):
    """Runs a backward of its own while it computes its output, as layers that are trained locally do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = Net(width), nn.Linear(width, 1)

    def inner_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner_loss(x).backward()
        return self.outer(x)


def backward_inside(rank: int, world: int, width: int, outside: bool) -> int:
    """Also in the very first forward, of which no backward has come yet."""
    model = LearnsInside(width)
    plain: Any
    plain, wrapped = _wrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        output = wrapped(inputs(step, rank, width))
        if outside:
            output.square().mean().backward()

        def loss(_: Any, r: int, step: int = step) -> torch.Tensor:
            x = inputs(step, r, width)
            return plain.inner_loss(x) + (plain.outer(x).square().mean() if outside else 0)

        assert_mean(model, mean_by_hand(plain, world, loss))
    return wrapped.stats().num_steps


@everywhere
@widths
@pytest.mark.parametrize("outside", [False, True], ids=["alone", "and one after it"])
def test_a_backward_inside_forward_is_reduced(outside: bool, width: int, backend: str) -> None:
    assert run_ranks(2, backward_inside, width, outside, backend=backend) == [6 if outside else 3] * 2


def around(rank: int, world: int, width: int) -> int:
    model = Net(width)
    plain, wrapped = _wrapped(model)
    for step in range(3):
        wrapped.zero_grad()
        _square(wrapped, step, rank, width).backward()
        wrapped.zero_grad()
        _square(wrapped.module, step, rank, width).backward()
        plain.zero_grad()
        _square(plain, step, rank, width).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    return wrapped.stats().num_steps


@widths
def test_a_backward_around_the_wrapper_stays_local(width: int) -> None:
    assert run_ranks(2, around, width) == [3, 3]


class Skips(nn.Module):
    """Hands its input through where it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = Net(width)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        return 2 * x if skips else self.net(x)


def use_no_parameter(rank: int, world: int, width: int) -> int:
    """In turn, one rank's backward reaches the output and then only its input; at the end that of every rank."""
    model = Skips(width)
    plain, wrapped = _wrapped(model)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = inputs(step, rank, width).requires_grad_()
        return model(x, step == 3 or step % 2 == rank).square().mean()

    for step in range(4):
        wrapped.zero_grad()
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))
    return wrapped.stats().num_steps


@everywhere
@widths
def test_a_rank_whose_backward_reaches_no_parameter_takes_part(width: int, backend: str) -> None:
    assert run_ranks(2, use_no_parameter, width, backend=backend) == [4, 4]


def around_after_none(rank: int, world: int, width: int) -> int:
    """One rank's backward reaches no parameter; then all ranks run one around the wrapper."""
    model = Skips(width)
    _, wrapped = _wrapped(model)
    for step in range(2):
        wrapped(inputs(step, rank, width).requires_grad_(), rank == step).square().mean().backward()
        wrapped.zero_grad()
        _square(model.net, step, rank, width).backward()
        wrapped.zero_grad()
    return wrapped.stats().num_steps


@widths
def test_a_backward_around_the_wrapper_stays_local_after_one_without_gradient(width: int) -> None:
    assert run_ranks(2, around_after_none, width, timeout_s=30, pg_timeout_s=10) == [2, 2]


def freeze_to_look(rank: int, world: int, width: int) -> int:
    """Rank 0 makes an adversarial input by a backward through the frozen model, before and amid training."""
    model = Net(width)
    plain, wrapped = _wrapped(model)
    for step in range(3):
        if rank == 0:
            wrapped.requires_grad_(False)
            x = inputs(70 + step, rank, width).requires_grad_()
            wrapped(x).sum().backward()
            assert x.grad is not None
            wrapped.requires_grad_(True)
        wrapped.zero_grad()
        _square(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: _square(m, step, r, width)))
    return wrapped.stats().num_steps


@everywhere
@widths
def test_a_backward_through_a_frozen_model_reduces_nothing(width: int, backend: str) -> None:
    assert run_ranks(2, freeze_to_look, width, backend=backend) == [3, 3]


class RecomputedPolicy(Policy):
    """With `recompute` its first gradient comes in a nested backward; with `again`, another one follows outside."""

    recompute = again = False

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(torch.tanh(self.trunk(x)))

    def forward(self, x: torch.Tensor) -> Any:
        # Backward takes the latest operation first.
        outside = self.trunk(x).mean(1, keepdim=True) if self.again else 0.0
        inside = checkpoint(self.both, x, use_reentrant=True) if self.recompute else self.both(x)
        return Normal(inside + outside, 1.0)


def unseen_and_nested(rank: int, world: int, width: int, again: bool) -> None:
    model = RecomputedPolicy(width)
    model.again = again
    plain, wrapped = _wrapped(model)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = inputs(step, rank, width).requires_grad_()
        return -model(x).log_prob(torch.ones(4, 1)).mean()

    for step in range(4):
        wrapped.zero_grad()
        model.recompute = rank == step % 2
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))


@everywhere
@widths
@pytest.mark.parametrize("again", [False, True], ids=["all inside", "more outside"])
def test_an_unseen_loss_may_bring_its_first_gradient_in_a_nested_backward(
    again: bool, width: int, backend: str
) -> None:
    run_ranks(2, unseen_and_nested, width, again, backend=backend)


def unseen_and_nested_under_no_sync(rank: int, world: int, width: int) -> int:
    """A forward waits for a backward that never comes; then one that is not to be reduced brings all in a nested one."""
    model = RecomputedPolicy(width)
    model.recompute = True
    plain, wrapped = _wrapped(model)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return -model(inputs(step, rank, width).requires_grad_()).log_prob(torch.ones(4, 1)).mean()

    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(step, rank, width))
        with wrapped.no_sync():
            loss(wrapped, step, rank).backward()
        loss(plain, step, rank).backward()
        for param, own in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, own.grad)
        plain.zero_grad()
    return wrapped.stats().num_steps


@everywhere
@widths
def test_an_unseen_nested_backward_under_no_sync_is_not_taken_for_another(width: int, backend: str) -> None:
    assert run_ranks(2, unseen_and_nested_under_no_sync, width, backend=backend) == [0, 0]
