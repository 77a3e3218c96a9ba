"""Mixed precision on CPU with bfloat16: low inside, full outside, also with checkpointing and accumulation."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.ddp.features.buffers import BufferHookLocation
from tests.cluster import run_ranks
from tests.ddp.by_hand import LARGE, SMALL, Net, alike, assert_mean, everywhere, inputs, mean_by_hand, unwrapped

pytestmark = pytest.mark.covering(1)

LOW = torch.bfloat16


class Watching(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.recompute = recompute
        self.inside: list[torch.dtype] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.inside += [x.dtype, self.a.weight.dtype, self.norm.running_mean.dtype]
        return torch.relu(self.a(x))

    def forward(self, x: torch.Tensor, scale: dict[str, Any]) -> torch.Tensor:
        if self.recompute == "no":
            hidden = self.body(x)
        else:
            hidden = checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
        return self.b(self.norm(hidden)) * scale["by"]


def train(rank: int, world: int, reduce_dtype: torch.dtype | None, recompute: str, accumulate: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Watching(recompute)
    config = phalanx.MixedPrecision(param_dtype=LOW, reduce_dtype=reduce_dtype, buffer_dtype=LOW)
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=config, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        if accumulate:
            with wrapped.no_sync():
                wrapped(torch.randn(8, 8), {"by": torch.ones(1)}).float().pow(2).mean().backward()
        x = torch.randn(8, 8, requires_grad=recompute == "reentrant")
        output = wrapped(x, {"by": torch.ones(1)})
        assert output.dtype == LOW
        _assert_full(wrapped)
        output.float().pow(2).mean().backward()
        _assert_full(wrapped)
        optimizer.step()
    assert set(model.inside) == {LOW}
    expected = reduce_dtype or LOW
    assert {bucket.flat.dtype for bucket in wrapped.reducer.buckets} == {expected}
    with torch.no_grad():
        wrapped(torch.randn(8, 8), {"by": torch.ones(1)})
    _assert_full(wrapped)
    return [param.detach().clone() for param in model.parameters()]


def _assert_full(wrapped: nn.Module) -> None:
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32}
    assert {value.dtype for value in wrapped.state_dict().values() if value.is_floating_point()} == {torch.float32}
    assert {p.grad.dtype for p in wrapped.parameters() if p.grad is not None} <= {torch.float32}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("recompute", ["no", "plain", "reentrant"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["every step", "accumulating"])
def test_parameters_are_low_inside_and_full_outside(
    reduce_dtype: torch.dtype | None, recompute: str, accumulate: bool
) -> None:
    results = run_ranks(2, train, reduce_dtype, recompute, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "replicas stay identical"
    plain = run_ranks(2, train, reduce_dtype, "no", accumulate)
    if recompute == "plain":
        assert all(torch.equal(a, b) for a, b in zip(results[0], plain[0], strict=True))


def low_buffers(rank: int, world: int) -> tuple[torch.dtype, torch.dtype, bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, inputs: seen.append(module.running_mean.dtype))
    config = phalanx.MixedPrecision(param_dtype=LOW, buffer_dtype=LOW)
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=config)
    before = model[1].running_mean.clone()
    wrapped(torch.randn(8, 4)).float().sum().backward()
    return seen[0], model[1].running_mean.dtype, bool((model[1].running_mean != before).any())


def test_buffers_are_low_inside_and_keep_what_forward_did_to_them() -> None:
    assert run_ranks(1, low_buffers) == [(LOW, torch.float32, True)]


def views_asked_for(rank: int, world: int) -> None:
    with pytest.warns(UserWarning, match="gradient_as_bucket_view=True has no effect"):
        phalanx.DistributedDataParallel(
            nn.Linear(2, 2), mixed_precision=phalanx.MixedPrecision(LOW), gradient_as_bucket_view=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        phalanx.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=phalanx.MixedPrecision(LOW))


def test_views_that_cannot_be_are_said_so() -> None:
    run_ranks(1, views_asked_for)


# -- sizes, and several backwards ------------------------------------------------------------------

# In bfloat16 too, the larger weight has more than 64 KiB.
widths = pytest.mark.parametrize("width", [SMALL, 2 * LARGE], ids=["small", "large"])


def _loss(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return model(inputs(step, rank, width)).float().square().mean()


def by_size(rank: int, world: int, width: int, reduce_dtype: torch.dtype | None, accumulate: bool) -> None:
    model = Net(width)
    plain = unwrapped(model)
    config = phalanx.MixedPrecision(param_dtype=LOW, reduce_dtype=reduce_dtype)
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=config, bucket_cap_mb=0.05)
    for step in range(3):
        wrapped.zero_grad()
        if accumulate:
            with wrapped.no_sync():
                _loss(wrapped, step + 50, rank, width).backward()
        _loss(wrapped, step, rank, width).backward()
        _assert_full(wrapped)

        def loss(m: nn.Module, r: int, step: int = step) -> torch.Tensor:
            return _loss(m, step, r, width) + (_loss(m, step + 50, r, width) if accumulate else 0)

        # The forward rounds to eight bits, and so does a sum of ranks in bfloat16.
        assert_mean(model, mean_by_hand(plain, world, loss), tolerance=0.05)


@everywhere
@widths
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True], ids=["every step", "accumulating"])
def test_gradients_of_any_size_are_the_mean(
    accumulate: bool, reduce_dtype: torch.dtype | None, width: int, backend: str
) -> None:
    run_ranks(2, by_size, width, reduce_dtype, accumulate, backend=backend)


def several(rank: int, world: int, width: int, order: str) -> None:
    model = Net(width)
    plain = unwrapped(model)
    config = phalanx.MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=config, bucket_cap_mb=0.05)
    for step in range(3):
        wrapped.zero_grad()
        steps = (step, step) if order == "twice" else (step, step + 50)
        first = _loss(wrapped, steps[0], rank, width)
        if order == "twice":
            first.backward(retain_graph=True)
            first.backward()
        else:
            second = _loss(wrapped, steps[1], rank, width)
            for loss in (first, second) if order == "in order" else (second, first):
                loss.backward()
        _assert_full(wrapped)
        expected = mean_by_hand(
            plain, world, lambda m, r, steps=steps: _loss(m, steps[0], r, width) + _loss(m, steps[1], r, width)
        )
        assert_mean(model, expected, tolerance=0.05)


@everywhere
@widths
@pytest.mark.parametrize("order", ["in order", "in reverse", "twice"])
def test_backwards_of_several_forwards_and_several_of_one(order: str, width: int, backend: str) -> None:
    run_ranks(2, several, width, order, backend=backend)


class TwoTables(nn.Module):
    """Sparse gradients, of which the first travels during backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Embedding(20, 8, sparse=True) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor, uses_first: bool) -> torch.Tensor:
        x = self.second(tokens)
        return self.head(torch.tanh(x + self.first(tokens)) if uses_first else torch.tanh(x))


def train_sparse_low(rank: int, world: int, reduce_dtype: torch.dtype | None) -> None:
    low = phalanx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = TwoTables()
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=low, bucket_cap_mb=1e-5, on_unused="ignore")
    plain = TwoTables()
    for step in range(4):
        wrapped.zero_grad()
        plain.zero_grad()
        tokens = [torch.arange(4) + 3 * step + other for other in range(world)]
        uses = [step < 2 or other == 0 for other in range(world)]
        wrapped(tokens[rank], uses[rank]).float().square().mean().backward()
        for one, used in zip(tokens, uses, strict=True):
            (plain(one, used).square().mean() / world).backward()
        for (name, param), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is not None and param.grad.dtype == torch.float32, name
            torch.testing.assert_close(param.grad.to_dense(), want.grad.to_dense(), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_sparse_gradients_of_low_precision_become_those_of_full_parameters(
    reduce_dtype: torch.dtype | None, backend: str
) -> None:
    run_ranks(2, train_sparse_low, reduce_dtype, backend=backend)


class Counter(nn.Module):
    """A buffer that each forward adds to, also one that backward computes again."""

    def __init__(self, rank: int, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.recompute = recompute
        self.register_buffer("level", torch.full((3,), float(rank)))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.level[0] += 1.0
        return self.norm(self.layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def _mean_of_level(state: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
    level = buffers["level"].div_(dist.get_world_size())
    return [dist.all_reduce(level, async_op=True).get_future()]


def change_buffers_after_forward(rank: int, world: int, recompute: bool) -> None:
    config = phalanx.MixedPrecision(param_dtype=LOW, buffer_dtype=LOW)
    wrapped = phalanx.DistributedDataParallel(Counter(rank, recompute), mixed_precision=config)
    wrapped._register_buffer_comm_hook(None, _mean_of_level, BufferHookLocation.POST_FORWARD)
    output = wrapped(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)))
    wrapped.module.level[2] = 1.0 + 2**-20  # which the low precision does not have
    before = {name: buffer.clone() for name, buffer in wrapped.module.named_buffers()}
    output.float().square().mean().backward()
    after = dict(wrapped.module.named_buffers())
    assert torch.equal(after["level"][1:], before["level"][1:])
    changed = not torch.equal(after["norm.running_mean"], before["norm.running_mean"])
    assert changed == recompute, "what a module does to its buffers when it is computed again is kept"
    assert after["level"][0] == before["level"][0] + 1.0 if recompute else torch.equal(after["level"], before["level"])


@pytest.mark.parametrize("recompute", [False, True], ids=["once", "computed again"])
def test_buffers_changed_between_forward_and_backward_stay_so(recompute: bool) -> None:
    run_ranks(2, change_buffers_after_forward, recompute)


def backward_amid_forward(rank: int, world: int, width: int, reduces: bool) -> None:
    """The backward of one forward runs in the midst of the next: parameters are low there already, and full afterwards."""
    model = Net(width)
    before = [param.detach().clone() for param in model.parameters()]
    wrapped = phalanx.DistributedDataParallel(model, mixed_precision=phalanx.MixedPrecision(param_dtype=LOW))
    for step in range(3):
        with contextlib.nullcontext() if reduces else wrapped.no_sync():
            loss = wrapped(inputs(step, rank, width)).square().mean()
        handle = model.register_forward_pre_hook(lambda _module, _args, loss=loss: loss.backward())
        again = wrapped(inputs(step + 10, rank, width)).square().mean()
        handle.remove()
        assert all(map(torch.equal, before, model.parameters())), "full, to the bit"
        again.backward()
        assert all(map(torch.equal, before, model.parameters())), "full, to the bit"
        for param in model.parameters():
            assert param.grad is not None and param.grad.dtype == torch.float32 and alike(param.grad)
        wrapped.zero_grad()


@everywhere
@widths
@pytest.mark.parametrize("reduces", [True, False], ids=["reduced", "no_sync"])
def test_a_backward_in_the_midst_of_a_forward_leaves_full_parameters(reduces: bool, width: int, backend: str) -> None:
    run_ranks(2, backward_amid_forward, width, reduces, backend=backend)


# -- parameters of several wrappers ----------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def shared(rank: int, world: int, width: int, inside: bool) -> None:
    config = phalanx.MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
    body = Net(width)
    models = [Headed(body)] if inside else [Headed(body), Headed(body)]
    plain = unwrapped(body)
    if inside:
        models[0].body = phalanx.DistributedDataParallel(body, mixed_precision=config)
    wrapped = [phalanx.DistributedDataParallel(model, mixed_precision=config) for model in models]
    for step in range(3):
        body.zero_grad()
        with contextlib.ExitStack() as stack:
            for one in (*wrapped, models[0].body) if inside else wrapped:
                stack.enter_context(one.no_sync())
            sum(_loss(one, step + 50, rank, width) for one in wrapped).backward()
        local = [param.grad.clone() for param in body.parameters()]
        sum(0.0 * _loss(one, step, rank, width) for one in wrapped).backward()
        for one in wrapped:
            _assert_full(one)
        # Gradients that had come before are the mean of what they were, and have not been rounded on the way.
        for param, mine in zip(body.parameters(), local, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(param.grad, mine / world, rtol=1e-6, atol=1e-9)
        expected = mean_by_hand(plain, world, lambda m, r, step=step: len(wrapped) * _loss(m, step + 50, r, width))
        assert_mean(body, expected, tolerance=0.05)


@everywhere
@widths
@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_parameters_of_two_wrappers_are_full_after_a_backward_of_both(inside: bool, width: int, backend: str) -> None:
    run_ranks(2, shared, width, inside, backend=backend)
