"""Dtypes, shapes and layouts: sparse, half, double, complex, empty, scalar, channels_last, mixed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import ConfigError
from tests.cluster import run_ranks
from tests.ddp.by_hand import alike, assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = pytest.mark.covering(1)


class Mixture(nn.Module):
    """One parameter of each kind; the loss touches them all."""

    def __init__(self) -> None:
        super().__init__()
        self.p_single = nn.Parameter(torch.randn(5, 3))
        self.p_double = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.p_half = nn.Parameter(torch.randn(6).half())
        self.p_brain = nn.Parameter(torch.randn(7).bfloat16())
        self.p_complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.gapped = nn.Parameter(torch.randn(6, 8)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for name, param in self.named_parameters():
            values = torch.view_as_real(param) if param.is_complex() else param
            total = total + (values.double() * (1 + len(name)) * x.double().mean()).pow(2).sum() * 1e-2
        return total


def mixture_grads(rank: int, world: int, views: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(Mixture(), gradient_as_bucket_view=views, bucket_cap_mb=0.0005)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.full((2,), 1.0 + rank)).backward()
    for param in wrapped.parameters():
        if param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last):
            assert param.grad.stride() == param.stride()
    return [param.grad.clone() for param in wrapped.parameters()]


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_of_parameter_gets_the_mean_in_its_own_dtype(world: int, views: bool) -> None:
    results = run_ranks(world, mixture_grads, views)
    torch.manual_seed(0)
    alone = Mixture()
    grads = []
    for rank in range(world):
        model = copy.deepcopy(alone)
        model(torch.full((2,), 1.0 + rank)).backward()
        grads.append([param.grad for param in model.parameters()])
    for i, param in enumerate(alone.parameters()):
        got = results[0][i]
        assert got.dtype == param.dtype and got.shape == param.shape
        assert all(torch.equal(got, other[i]) for other in results)
        want = sum(g[i].to(torch.complex128 if param.is_complex() else torch.float64) for g in grads) / world
        loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(param.dtype, 1e-5)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=loose, atol=loose)


class Words(nn.Module):
    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=not functional)
        self.functional = functional
        self.spare = nn.Embedding(10, 4, sparse=True)
        self.use_spare = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.functional:  # nobody can see from outside that this gradient is sparse
            found = nn.functional.embedding(tokens, self.table.weight, sparse=True)
        else:
            found = self.table(tokens)
        return (found + self.spare(tokens)).sum() if self.use_spare else found.sum()


def sparse_grads(rank: int, world: int, functional: bool) -> None:
    torch.manual_seed(0)
    model = Words(functional)
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    for step in range(3):
        wrapped.zero_grad()
        model.use_spare = step == 1 and rank == 0
        wrapped(torch.tensor([rank, 5, 5])).backward()
        expected = torch.zeros(10, 4)
        for other in range(world):
            expected[other] += 1 / world
        expected[5] += 2
        assert model.table.weight.grad.is_sparse != functional
        torch.testing.assert_close(model.table.weight.grad.to_dense(), expected)
        if step == 1:
            spare = torch.zeros(10, 4)
            spare[0], spare[5] = 1 / world, 2 / world
            torch.testing.assert_close(model.spare.weight.grad.to_dense(), spare)
        else:
            assert model.spare.weight.grad is None


@pytest.mark.parametrize("functional", [False, True], ids=["declared", "undeclared"])
@pytest.mark.parametrize("world", [2, 3])
def test_sparse_gradients_are_averaged_and_unused_ones_left_alone(world: int, functional: bool) -> None:
    run_ranks(world, sparse_grads, functional)


def count_collectives(rank: int, world: int) -> list[int]:
    """Collectives in each of four steps of a model with two sparse gradients; the third needs more room than agreed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9000, 4, sparse=True), nn.Linear(4, 4))
    wrapped = phalanx.DistributedDataParallel(model)
    reducer = wrapped.reducer
    collectives = reducer.collectives
    started: list[str] = []
    for verb in ("all_reduce", "all_gather_told", "reduce_scatter"):
        setattr(collectives, verb, _counted(getattr(collectives, verb), verb, started))
    counts = []
    for num_rows in (10, 10, 8000, 8000):
        started.clear()
        wrapped(torch.randint(9000, (num_rows,))).sum().backward()
        wrapped.zero_grad()
        counts.append(len(started))
    assert len(reducer.buckets) == 2
    return counts[1:]


def _counted(verb: Any, name: str, started: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        started.append(name)
        return verb(*args, **kwargs)

    return counted


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_sparse_gradient_costs_one_collective_and_one_more_where_it_grows(backend: str) -> None:
    assert run_ranks(2, count_collectives, backend=backend) == [[2, 3, 2]] * 2


class Undefined(torch.autograd.Function):
    """Uses a weight in forward and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Surprising(nn.Module):
    """A weight planned as dense whose gradient is sparse, or undefined, as `turn` says; the other one is plain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.plain = (nn.Parameter(torch.randn(width, width)) for _ in range(2))

    def forward(self, x: torch.Tensor, turn: str) -> torch.Tensor:
        hidden = torch.tanh(x @ self.plain)
        if turn == "undefined":
            return Undefined.apply(hidden, self.table)
        rows = torch.nn.functional.embedding(torch.arange(4), self.table, sparse=turn == "sparse")
        return hidden * rows


def surprise(rank: int, world: int, width: int, views: bool, turns: list[tuple[str, str]]) -> None:
    model = Surprising(width)
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, on_unused="ignore", bucket_cap_mb=1)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(inputs(step, rank, width), turns[step][rank]).square().mean()

    for step in range(len(turns)):
        wrapped.zero_grad()
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))


_DENSE, _SPARSE, _UNDEFINED = "dense", "sparse", "undefined"
TURNS = [
    (_DENSE, _DENSE),
    (_DENSE, _DENSE),
    (_SPARSE, _SPARSE),
    (_SPARSE, _DENSE),
    (_UNDEFINED, _DENSE),
    (_UNDEFINED, _UNDEFINED),
    (_DENSE, _DENSE),
]


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_gradient_that_is_not_as_planned_is_still_averaged(views: bool, width: int, backend: str) -> None:
    run_ranks(2, surprise, width, views, TURNS, backend=backend)


def surprise_optimizer(rank: int, world: int, width: int, options: dict[str, Any]) -> None:
    model = Surprising(width)
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore", bucket_cap_mb=1)
    zero = phalanx.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True, **options
    )
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(inputs(step, rank, width), TURNS[step][rank]).square().mean()

    for step in range(len(TURNS)):
        zero.zero_grad()
        loss(wrapped, step, rank).backward()
        zero.step()
        means = mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r))
        for param, mean in zip(plain.parameters(), means, strict=True):
            param.grad = None if mean is None else mean.float()
        by_hand.step()
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, want)
            assert alike(param)


@everywhere
@widths
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_a_gradient_that_is_not_as_planned_is_still_stepped_with(
    options: dict[str, Any], width: int, backend: str
) -> None:
    run_ranks(2, surprise_optimizer, width, options, backend=backend)


class Conjugates(nn.Module):
    """Gradients, parameters and buffers that stand for the conjugate, or the negative, of their memory."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)  # so that replicating has something to do
        self.square = nn.Parameter(torch.randn(width, width, dtype=torch.complex64))
        self.vector = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(width, dtype=torch.complex64).conj())
        self.fixed = nn.Parameter(torch.randn(width, dtype=torch.complex64).conj(), requires_grad=False)
        self.register_buffer("phases", torch.randn(width, dtype=torch.complex64).conj())
        self.register_buffer("angles", torch.randn(width, dtype=torch.complex64).conj().imag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.complex(x, x.flip(-1)) @ self.square.mH * self.phases + self.turned * self.fixed
        turned = self.vector.conj().view(-1)
        return (mixed.abs().mean() + (turned.imag * x * self.angles + turned.real).mean()) * x.std()


def conjugates(rank: int, world: int, views: bool, width: int) -> None:
    model = Conjugates(width, rank)
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, check_drift_every=1)
    plain = unwrapped(model)
    sources = [Conjugates(width, 0).state_dict()[name] for name in model.state_dict()]
    assert all(torch.equal(got, want) for got, want in zip(model.state_dict().values(), sources, strict=True))
    loss = lambda module, each: module(inputs(0, each, width))  # noqa: E731
    for _ in range(3):
        wrapped.zero_grad()
        loss(wrapped, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, loss))


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_what_stands_for_the_conjugate_of_its_memory_is_averaged(views: bool, width: int, backend: str) -> None:
    run_ranks(2, conjugates, views, width, backend=backend)


def conjugated(rank: int, world: int, views: bool) -> None:
    wrapped = phalanx.DistributedDataParallel(nn.Linear(3, 1, dtype=torch.complex64), gradient_as_bucket_view=views)
    weight = wrapped.module.weight
    x = torch.randn(world, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    before = torch.zeros(1, 3)
    for step in range(4):
        wrapped(x[rank]).real.sum().backward()
        want = before + x.conj().mean(dim=0)
        torch.testing.assert_close(weight.grad.resolve_conj(), want)
        # The same memory for other values, to which the next backward adds. Only the first holds on to the tensor it is of.
        weight.grad, before = (weight.grad if step % 2 == 0 else weight.grad.detach()).conj(), want.conj()


@everywhere
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_gradient_that_the_user_conjugates_is_added_to_as_such(views: bool, backend: str) -> None:
    run_ranks(2, conjugated, views, backend=backend)


class ComplexHalves(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(size, dtype=torch.complex32))
        self.sometimes = nn.Parameter(torch.ones(3, dtype=torch.complex32))

    def forward(self, x: float, both: bool) -> torch.Tensor:
        params = (self.used, self.sometimes) if both else (self.used,)
        return sum((torch.view_as_real(param).float() * x).sum() for param in params)


def complex_halves(rank: int, world: int, views: bool, size: int) -> None:
    model = ComplexHalves(size)
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, on_unused="ignore")
    for step in range(3):
        wrapped.zero_grad()
        wrapped(rank + 1.0, step != 1 or rank == 0).backward()
        assert torch.view_as_real(model.used.grad).eq((1 + world) / 2).all()
        wanted = 1 / world if step == 1 else (1 + world) / 2
        assert torch.view_as_real(model.sometimes.grad).eq(wanted).all()
    with wrapped.weight(3000.0 * (rank + 1)):
        wrapped.zero_grad()
        wrapped(rank + 1.0, True).backward()
    assert torch.view_as_real(model.used.grad).float().allclose(torch.tensor(5 / 3), atol=2e-3)


@everywhere
@pytest.mark.parametrize("size", [4, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_complex_numbers_of_half_precision_are_averaged(views: bool, size: int, backend: str) -> None:
    run_ranks(2, complex_halves, views, size, backend=backend)


class Chosen(nn.Module):
    """In bfloat16; the second layer is used by rank 0 alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor, with_second: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return (self.second(x) if with_second else x).float().square().mean()


def by_chosen_dtype(rank: int, world: int, width: int, options: dict[str, Any]) -> None:
    """`grad_dtype` is set before wrapping, changed afterwards, and set back."""
    model = Chosen(width)
    plain, by_rank = unwrapped(model), [inputs(0, r, width).bfloat16() for r in range(world)]
    for step, dtype in enumerate([torch.float32, torch.float32, torch.float64, torch.bfloat16]):
        for param in (*plain.parameters(), *model.parameters()):
            param.grad = None
            param.grad_dtype = dtype  # type: ignore[assignment]
        if step == 0:
            wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.01, on_unused="ignore", **options)
        wrapped(by_rank[rank], rank == 0).backward()
        assert {param.grad.dtype for param in model.parameters()} == {dtype}
        rounded = 1e-2 if dtype is torch.bfloat16 else 1e-5
        assert_mean(model, mean_by_hand(plain, world, lambda m, r: m(by_rank[r], r == 0)), rounded)


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_travel_in_the_dtype_that_users_chose_for_them(views: bool, width: int, backend: str) -> None:
    run_ranks(2, by_chosen_dtype, width, {"gradient_as_bucket_view": views}, backend=backend)


def chosen_beside_low_precision(rank: int, world: int, width: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    plain, by_rank = unwrapped(model), [inputs(0, r, width) for r in range(world)]
    for param in model.parameters():
        param.grad_dtype = torch.float64
    wrapped = phalanx.DistributedDataParallel(model, **options)
    with wrapped.no_sync():
        wrapped(by_rank[rank]).float().square().mean().backward()
    wrapped.zero_grad()
    wrapped(by_rank[rank]).float().square().mean().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
    assert_mean(model, mean_by_hand(plain, world, lambda m, r: m(by_rank[r]).square().mean()), 6e-2)


@everywhere
@widths
def test_gradients_of_low_precision_come_in_the_dtype_that_users_chose_for_them(width: int, backend: str) -> None:
    for dtypes in ((torch.bfloat16, torch.float32), (torch.bfloat16, None), (None, torch.bfloat16)):
        options = {"mixed_precision": phalanx.MixedPrecision(*dtypes)}
        run_ranks(2, chosen_beside_low_precision, width, options, backend=backend)


def scattered_in_chosen_dtype(rank: int, world: int) -> None:
    model = Chosen(8)
    wrapped = phalanx.DistributedDataParallel(model)
    model.first.bias.grad_dtype = torch.float32
    with pytest.raises(ConfigError, match=r"'first.bias' is torch.bfloat16 and its grad_dtype torch.float32"):
        phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)


def test_gradients_of_another_dtype_are_not_scattered() -> None:
    run_ranks(2, scattered_in_chosen_dtype)


def _train_beside(rank: int, world: int, default: str) -> list[torch.Tensor]:
    """Some steps of a model of the processor, while tensors without a device are made on `default`."""
    cpu = torch.device("cpu")
    rows, dense = nn.Embedding(50, 8, sparse=True, device=cpu), nn.Linear(8, 300, device=cpu)
    module = nn.Sequential(rows, dense, nn.BatchNorm1d(300, device=cpu))
    model = phalanx.DistributedDataParallel(module, bucket_cap_mb=0.001)
    zero = phalanx.ZeroRedundancyOptimizer(dense.parameters(), torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(rows.parameters(), lr=0.1)
    inputs = torch.arange(24, device=cpu).view(3, 8) * (rank + 1) % 50
    torch.set_default_device(default)
    try:
        for batch in inputs:
            model(batch).sigmoid().square().mean().backward()
            zero.clip_grad_norm_(1.0)
            for optimizer in (zero, plain):
                optimizer.step()
                optimizer.zero_grad()
        phalanx.DistributedDataParallel(model.module)
        with model.join():
            for batch in inputs[rank:]:
                model(batch).mean().backward()
    finally:
        torch.set_default_device(None)
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_the_default_device_is_not_that_of_the_model(backend: str) -> None:
    plain, elsewhere = (run_ranks(2, _train_beside, default, backend=backend) for default in ("cpu", "meta"))
    assert all(torch.equal(*pair) for each in zip(plain, elsewhere, strict=True) for pair in zip(*each, strict=True))
