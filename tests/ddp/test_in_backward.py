"""Optimizers that step during backward, alone and wrapped, and delayed all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.optim import apply_in_backward
from tests.cluster import ClusterFailure, run_ranks
from tests.ddp.by_hand import Breaks, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths
from tests.ddp.zoo import batch, make


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def _params(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def stepped(rank: int, world: int, way: str, max_norm: float | None, accumulate: bool) -> list[torch.Tensor]:
    model = make("mlp")
    handle = None
    if way == "in backward":
        handle = apply_in_backward(torch.optim.Adam, model.parameters(), lr=0.01, max_norm=max_norm)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if way == "after" else None
    for step in range(4):
        if accumulate:
            with wrapped.no_sync():
                _loss(wrapped, 10 + step, rank).backward()
        _loss(wrapped, step, rank).backward()
        if optimizer is None:
            assert all(param.grad is None for param in model.parameters()), "gradients are freed"
        else:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    if handle is not None and max_norm is not None:
        assert handle.last_norm is not None
    return _params(model)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("accumulate", [False, True], ids=["every step", "accumulating"])
def test_stepping_in_backward_equals_stepping_after_it(max_norm: float | None, accumulate: bool) -> None:
    inside = run_ranks(2, stepped, "in backward", max_norm, accumulate)
    after = run_ranks(2, stepped, "after", max_norm, accumulate)
    for got, same, want in zip(inside[0], inside[1], after[0], strict=True):
        assert torch.equal(got, same)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_it_works_without_a_wrapper_too(max_norm: float | None) -> None:
    model, reference = make("mlp"), make("mlp")
    handle = apply_in_backward(torch.optim.SGD, model.parameters(), lr=0.1, max_norm=max_norm)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        with handle.accumulate():
            _loss(model, 10 + step, 0).backward()
        _loss(model, step, 0).backward()
        _loss(reference, 10 + step, 0).backward()
        _loss(reference, step, 0).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    for got, want in zip(_params(model), _params(reference), strict=True):
        torch.testing.assert_close(got, want)
    assert len(handle.param_groups) == len(list(model.parameters()))


class Segments(nn.Module):
    """Layers in segments that reentrant checkpointing computes again, or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.checkpointed = checkpointed
        self.breaks_before: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            # Without a node between two segments, and with one.
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpointed else layer(x)
            x = torch.tanh(x) if number == 1 else x
            x = Breaks.apply(x) if number == self.breaks_before else x
        return x


@pytest.mark.parametrize("breaks_before", [None, 2, 0], ids=["none", "after one layer", "after three"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "reentrant"])
def test_clipping_in_backward_is_over_whole_backwards_and_goes_on_after_one_that_raised(
    checkpointed: bool, breaks_before: int | None
) -> None:
    model, reference = Segments(checkpointed), Segments(False)
    handle = apply_in_backward(torch.optim.SGD, model.parameters(), lr=0.1, max_norm=0.01)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if step == 1 and breaks_before is not None:
            model.breaks_before = breaks_before
            with pytest.raises(ArithmeticError, match="on purpose"):
                model(x).square().sum().backward()
            model.breaks_before = None
            model.zero_grad()
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        assert handle.last_norm is not None
        torch.testing.assert_close(handle.last_norm, norm)
        assert all(param.grad is None for param in model.parameters())
        for got, want in zip(_params(model), _params(reference), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [(True, True), (True, False), (False, True)], ids=["both", "first", "last"])
def test_a_layer_that_several_segments_share_is_stepped_once_by_its_whole_gradient(reentrant: tuple[bool, bool]) -> None:
    model, reference = make("mlp"), make("mlp")
    apply_in_backward(torch.optim.Adam, model.parameters(), lr=0.01)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        for one in (model, reference):
            x = batch(step, 0)[0].requires_grad_()
            first, last = (checkpoint(one, x, use_reentrant=True) if again else one(x) for again in reentrant)
            (first.square().sum() + last.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got, want in zip(_params(model), _params(reference), strict=True):
        assert torch.equal(got, want)


def with_an_outsider(rank: int, world: int, max_norm: float | None) -> float:
    """A temperature that is not part of the model is stepped by the same call."""
    model, temperature = make("mlp"), nn.Parameter(torch.ones(()))
    apply_in_backward(torch.optim.SGD, [*model.parameters(), temperature], lr=0.1, max_norm=max_norm)
    wrapped = phalanx.DistributedDataParallel(model)
    for step in range(3):
        (_loss(wrapped, step, rank) + temperature).backward()
        assert temperature.grad is None
    return temperature.item()


def test_parameters_that_the_wrapper_does_not_have_are_stepped_on() -> None:
    assert run_ranks(2, with_an_outsider, None) == pytest.approx([0.7, 0.7])


def test_clipping_over_parameters_that_the_wrapper_does_not_have_is_refused() -> None:
    with pytest.raises(ClusterFailure, match=r"max_norm got 1 of \d+ parameters that the wrapped model does not have"):
        run_ranks(2, with_an_outsider, 0.1)


def test_wrong_arguments_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no parameters"):
        apply_in_backward(torch.optim.SGD, [])
    with pytest.raises(TypeError, match="require a gradient"):
        apply_in_backward(torch.optim.SGD, [torch.ones(2)])
    with pytest.raises(ValueError, match="max_norm"):
        apply_in_backward(torch.optim.SGD, model.parameters(), max_norm=0.0)
    apply_in_backward(torch.optim.SGD, [model.weight])
    with pytest.raises(ValueError, match="another call of it steps already"):
        apply_in_backward(torch.optim.SGD, model.parameters())


def named_twice(rank: int, world: int) -> list[torch.Tensor]:
    model = make("mlp")
    apply_in_backward(torch.optim.SGD, [*model.parameters(), *model.parameters()], lr=0.1)
    wrapped = phalanx.DistributedDataParallel(model)
    for step in range(2):
        _loss(wrapped, step, rank).backward()
    return _params(model)


def test_a_parameter_that_is_given_twice_is_stepped_once_by_its_mean() -> None:
    first, second = run_ranks(2, named_twice)
    assert all(map(torch.equal, first, second))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(torch.tanh(self.early(x)))


def delayed_grads(rank: int, world: int, everything: bool) -> list[list[torch.Tensor]]:
    torch.manual_seed(rank)
    model = TwoTowers()
    chosen = [(n, p) for n, p in model.named_parameters() if everything or n.startswith("late")]
    wrapped = phalanx.DistributedDataParallel(
        model, delay_all_reduce_named_params=chosen, param_to_hook_all_reduce=model.early.weight
    )
    seen = []
    for step in range(3):
        wrapped.zero_grad()
        if step == 1:
            with wrapped.no_sync():
                _loss(wrapped, 10, rank).backward()
        _loss(wrapped, step, rank).backward()
        seen.append([param.grad.clone() for param in model.parameters()])
    return [*seen, _params(model)]


@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
def test_delayed_parameters_are_replicated_and_averaged(everything: bool) -> None:
    results = run_ranks(2, delayed_grads, everything)
    for first, second in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(0)
    model = TwoTowers()
    for step in range(3):
        model.zero_grad()
        for rank in range(2):
            if step == 1:
                (_loss(model, 10, rank) / 2).backward()
            (_loss(model, step, rank) / 2).backward()
        for got, param in zip(results[0][step], model.parameters(), strict=True):
            torch.testing.assert_close(got, param.grad)


def half_the_arguments(rank: int, world: int) -> None:
    model: Any = TwoTowers()
    with pytest.raises(ValueError, match="need to be set at the same time"):
        phalanx.DistributedDataParallel(model, param_to_hook_all_reduce=model.early.weight)


def test_delaying_needs_both_arguments() -> None:
    run_ranks(1, half_the_arguments)


# -- delayed parameters, when ranks differ ---------------------------------------------------------


class Gate(nn.Module):
    """The trigger of the delayed parameter is `c`, which is not used where `skips`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        hidden = torch.tanh(self.a(x))
        return hidden.sum(1) if skips else self.c(self.b(hidden)).sum(1)


def delayed(model: Gate) -> Any:
    return phalanx.DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("a.weight", model.a.weight)],
        param_to_hook_all_reduce=model.c.weight,
        on_unused="ignore",
        bucket_cap_mb=0.05,
    )


def skip_trigger(rank: int, world: int, width: int) -> None:
    model = Gate(width)
    plain, wrapped = unwrapped(model), delayed(model)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(inputs(step, rank, width), rank == 0 and step in (0, 2)).square().mean()

    for step in range(4):
        wrapped.zero_grad()
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))


@everywhere
@widths
def test_delayed_parameters_are_averaged_also_where_a_rank_does_not_use_the_trigger(width: int, backend: str) -> None:
    run_ranks(2, skip_trigger, width, backend=backend)


def join_with_delayed(rank: int, world: int, width: int) -> list[torch.Tensor]:
    model = Gate(width)
    plain, wrapped = unwrapped(model), delayed(model)
    counts = [2, 4]
    with wrapped.join():
        for step in range(counts[rank]):
            wrapped.zero_grad()
            wrapped(inputs(step, rank, width), False).square().mean().backward()

            def loss(m: nn.Module, r: int, step: int = step) -> torch.Tensor:
                # A rank without inputs counts, with a gradient of zero.
                return m(inputs(step, r, width), False).square().mean() * (step < counts[r])

            for param, mean in zip(model.parameters(), mean_by_hand(plain, world, loss), strict=True):
                assert param.grad is not None and mean is not None
                torch.testing.assert_close(param.grad.double(), mean, rtol=1e-5, atol=1e-7)
    return [param.detach().clone() for param in model.parameters()]


@everywhere
@widths
def test_delayed_parameters_may_have_uneven_inputs(width: int, backend: str) -> None:
    first, second = run_ranks(2, join_with_delayed, width, backend=backend)
    assert all(map(torch.equal, first, second))
