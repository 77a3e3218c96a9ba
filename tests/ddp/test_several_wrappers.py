"""Several wrappers over the same ranks: in one backward, in turns, and in an order that is not the same everywhere."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm.hooks import allreduce_hook
from phalanx.errors import MismatchError, ReductionError
from tests.cluster import run_ranks
from tests.ddp.by_hand import (
    SMALL,
    BrokenLayer,
    Net,
    alike,
    assert_mean,
    everywhere,
    inputs,
    mean_by_hand,
    unwrapped,
)

pytestmark = pytest.mark.covering(1)

# Each wrapper has several buckets with this cap, in a model of either width.
WIDTHS = {"small": (16, 0.0017), "large": (144, 0.09)}
widths = pytest.mark.parametrize("size", WIDTHS)


class Branched(nn.Module):
    """A layer in the middle that a rank may leave out; with None for `with_extra`, all of them: the input is returned."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.extra, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, with_extra: bool | None) -> torch.Tensor:
        if with_extra is None:
            return x
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.extra(x)) if with_extra else x)


def data(step: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def leaves_out(rank: int, step: int, which: int) -> bool:
    """Each rank leaves out the branch of each model in steps of its own, also two in one step."""
    return (3 * step + rank + which) % 4 < 2


def twins(models: Any, rank: int, step: int, width: int) -> torch.Tensor:
    x = data(step, rank, width)
    return sum(model(x, not leaves_out(rank, step, k)).square().mean() for k, model in enumerate(models))


def chained(models: Any, rank: int, step: int, width: int) -> torch.Tensor:
    x = data(step, rank, width)
    for k, model in enumerate(models):
        x = model(x, not leaves_out(rank, step, k))
    return x.square().mean()


def apart(models: Any, rank: int, step: int, width: int) -> torch.Tensor:
    """Every other step one of them takes no part at all."""
    return twins(models[: 1 + step % len(models)], rank, step, width)


def passed(models: Any, rank: int, step: int, width: int) -> torch.Tensor:
    """A backward through a wrapper that brings its parameters nothing on this rank, before it comes to the next."""
    x = models[0](data(step, rank, width), True)
    for k, model in enumerate(models[1:]):
        x = model(x, None if leaves_out(rank, step, k) else True)
    return x.square().mean()


def handed(models: Any, rank: int, step: int, width: int) -> torch.Tensor:
    """A wrapper whose module returns on this rank what others take as well, and autograd comes to after all of them."""
    x = data(step, rank, width).requires_grad_()
    outs = [model(x, None if k and leaves_out(rank, step, k) else True) for k, model in enumerate(models)]
    return sum(out.square().mean() for out in outs)


PROGRAMS = {"twins": twins, "chained": chained, "apart": apart, "passed": passed, "handed": handed}


def train_together(rank: int, world: int, program: str, size: str, options: dict[str, Any], hook_at: int | None) -> None:
    width, cap = WIDTHS[size]
    models, plain = ([Branched(width, 1 + k) for k in range(3)] for _ in range(2))
    wrapped = [phalanx.DistributedDataParallel(m, bucket_cap_mb=cap, on_unused="ignore", **options) for m in models]
    assert all(len(one.plan.buckets) > 2 for one in wrapped)
    loss_of = PROGRAMS[program]
    for step in range(6):
        for one in wrapped if step == hook_at else ():
            one.register_comm_hook(None, allreduce_hook)
        for model in (*models, *plain):
            model.zero_grad()
        loss_of(wrapped, rank, step, width).backward()
        for each in range(world):
            (loss_of(plain, each, step, width) / world).backward()
        for model, one in zip(models, plain, strict=True):
            for (name, param), want in zip(model.named_parameters(), one.parameters(), strict=True):
                assert (param.grad is None) == (want.grad is None), f"step {step}: {name}"
                if param.grad is not None:
                    torch.testing.assert_close(param.grad, want.grad, msg=f"step {step}: {name}")
                    assert alike(param.grad)


@everywhere
@widths
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_wrappers_share_a_backward_whatever_each_rank_leaves_out(
    options: dict[str, Any], program: str, size: str, backend: str
) -> None:
    run_ranks(3, train_together, program, size, options, None, backend=backend)


@everywhere
@pytest.mark.parametrize("hook_at", [0, 2], ids=["from the start", "midway"])
def test_wrappers_with_hooks_share_a_backward(hook_at: int, backend: str) -> None:
    # Midway, ranks agree on the hooks amid a backward in which some have buckets to launch first that others cannot yet.
    run_ranks(3, train_together, "twins", "small", {}, hook_at, backend=backend)


class MeanOverRanks(torch.autograd.Function):
    """A collective in the midst of backward, as that of a differentiable all_gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def log_on_one_rank(rank: int, world: int, size: str) -> int:
    width, cap = WIDTHS[size]
    torch.manual_seed(0)
    first, second = nn.Linear(width, width), nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    model = nn.ModuleList([first, second])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](MeanOverRanks.apply(self.parts[0](x)))

    wrapped = phalanx.DistributedDataParallel(Whole(), bucket_cap_mb=cap)
    seen: list[float] = []
    if rank == 0:
        for param in wrapped.parameters():
            param.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    for step in range(4):
        wrapped.zero_grad()
        wrapped(data(step, rank, width)).square().mean().backward()
        assert all(alike(param.grad) for param in wrapped.parameters() if param.grad is not None)
    return len(seen)


@everywhere
@widths
def test_a_hook_of_one_rank_does_not_change_when_buckets_leave(size: str, backend: str) -> None:
    assert run_ranks(2, log_on_one_rank, size, backend=backend) == [4 * 8, 0]


def use_in_another_order(rank: int, world: int, made: bool) -> str:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if rank == 1 and made:
        models.reverse()
    wrapped = [phalanx.DistributedDataParallel(model) for model in models]
    if rank == 1:
        wrapped.reverse()
    with pytest.raises(MismatchError) as raised:
        wrapped[0](torch.ones(2, 4)).sum().backward()
    return str(raised.value)


@everywhere
@pytest.mark.parametrize("made", [False, True], ids=["used", "made"])
def test_wrappers_of_one_shape_in_another_order_on_one_rank_are_told_apart(made: bool, backend: str) -> None:
    for rank, message in enumerate(run_ranks(2, use_in_another_order, made, backend=backend)):
        # Shared memory compares buckets; gloo, whose messages must fit together, what is to start.
        assert message.startswith(f"rank {rank}: step 0" if backend == "phalanx" else f"rank {rank}: the ranks differ")
        assert "wrapper 1" in message and "wrapper 2" in message and "same order on every rank" in message


def one_of_two_raises(rank: int, world: int, when: int) -> None:
    width, cap = WIDTHS["small"]
    models = [Branched(width, seed) for seed in (1, 2)]
    wrapped = [phalanx.DistributedDataParallel(model, bucket_cap_mb=cap) for model in models]

    def refuse(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    for step in range(4):
        if step == when:
            # At another place on each rank; but in the first backward, after some buckets have left.
            handle = next(models[rank % 2].parameters()).register_hook(refuse)
            with pytest.raises(ValueError, match="on purpose"):
                sum(one(data(step, rank, width), True).sum() for one in wrapped).backward()
            handle.remove()
        for model in models:
            model.zero_grad()
        sum(one(data(step, rank, width), True).sum() for one in wrapped).backward()
        assert all(alike(param.grad) for model in models for param in model.parameters() if param.grad is not None)


@everywhere
@pytest.mark.parametrize("when", [0, 2])
def test_a_backward_of_two_wrappers_that_raises_on_all_ranks_can_be_followed_by_another(when: int, backend: str) -> None:
    run_ranks(2, one_of_two_raises, when, backend=backend)


def looked_at_alone(rank: int, world: int, looks_after: bool) -> None:
    """Rank 0 makes a picture of one model's gradients, by a forward of its own; then backwards raise everywhere."""
    bodies = [Net(SMALL), Net(SMALL)]
    plain = [unwrapped(body) for body in bodies]
    first, second = wrapped = [phalanx.DistributedDataParallel(body) for body in bodies]
    x = inputs(9, rank, SMALL).requires_grad_()

    def refuse(_grad: torch.Tensor) -> None:
        raise BrokenLayer("on purpose")

    for step in range(4):
        if rank == 0 and not looks_after:
            torch.autograd.grad(first(x).sum(), x)
        # Where both take part, the backward of rank 0 does not come to the first.
        loss = first(inputs(step, rank, SMALL)).sum() if step % 2 else torch.zeros(())
        loss = second(inputs(step, rank, SMALL)).sum() + loss
        if rank == 0 and looks_after:
            picture = first(x)  # the last forward of the first model takes no part in the backward
            torch.autograd.grad(picture.sum(), x, retain_graph=True)
        handle = bodies[0 if rank and step % 2 else 1].a.weight.register_hook(refuse)
        with pytest.raises(BrokenLayer):
            loss.backward()
        handle.remove()
        for body, one, alone in zip(bodies, wrapped, plain, strict=True):
            one.zero_grad()
            one(inputs(step, rank, SMALL)).square().mean().backward()
            wanted = mean_by_hand(alone, world, lambda m, r, step=step: m(inputs(step, r, SMALL)).square().mean())
            assert_mean(body, wanted)


@everywhere
@pytest.mark.parametrize("looks_after", [False, True], ids=["before", "after"])
def test_a_forward_of_one_rank_alone_takes_no_part_in_a_backward_that_raises(looks_after: bool, backend: str) -> None:
    run_ranks(2, looked_at_alone, looks_after, backend=backend, timeout_s=30, pg_timeout_s=10)


class Headed(nn.Module):
    """A body that other models have too, and a head of its own."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, width)

    def forward(self, x: torch.Tensor, trains_body: bool = True) -> torch.Tensor:
        x = self.body(x)
        return self.head(x if trains_body else x.detach())


def two_heads(size: str) -> tuple[list[nn.Module], list[Any]]:
    width, cap = WIDTHS[size]
    torch.manual_seed(5)
    body = nn.Linear(width, width)
    models = [Headed(body, width) for _ in range(2)]
    return models, [phalanx.DistributedDataParallel(model, bucket_cap_mb=cap) for model in models]


def check_turns(rank: int, world: int, size: str) -> None:
    width, _ = WIDTHS[size]
    models, wrapped = two_heads(size)
    for step in range(6):
        for model in models:
            model.zero_grad()
        turn = step % 2
        idle = wrapped[1 - turn](data(step, rank, width))  # waits for a backward that never comes, or comes too late
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nobody has gone around a wrapper
            wrapped[turn](data(step, rank, width)).square().mean().backward()
        del idle
        everyone = [models[turn](data(step, other, width)).square().mean() for other in range(world)]
        params = list(models[turn].parameters())
        wanted = torch.autograd.grad(sum(everyone) / world, params)
        for param, mean in zip(params, wanted, strict=True):
            assert param.grad is not None, f"step {step}: a gradient got lost"
            torch.testing.assert_close(param.grad, mean)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@widths
def test_wrappers_of_one_body_are_trained_by_turns(size: str, backend: str) -> None:
    run_ranks(2, check_turns, size, backend=backend)


def check_shared(rank: int, world: int, size: str, options: dict[str, Any], inside: bool) -> None:
    width, cap = WIDTHS[size]
    torch.manual_seed(5)
    body = nn.Linear(width, width)
    options = {"bucket_cap_mb": cap, "on_unused": "raise", **options}
    first = phalanx.DistributedDataParallel(body if inside else Headed(body, width), **options)
    second = phalanx.DistributedDataParallel(Headed(first if inside else body, width), **options)
    called = [second] if inside else [first, second]

    def loss(of: int, models: list[Any], *more: bool) -> torch.Tensor:
        return torch.stack([model(data(step, of, width), *more).square().mean() for model in models]).sum()

    params = list({param for model in called for param in model.parameters()})
    for step in range(4):
        trains_body = step != 2 or bool(options.get("static_graph"))
        for param in params:
            param.grad = None
        if step == 3:
            with first.no_sync(), second.no_sync():
                loss(rank, called).backward()
        loss(rank, called, trains_body).backward()
        times = 2 if step == 3 else 1
        total = torch.stack([loss(other, [each.module for each in called], trains_body) for other in range(world)]).sum()
        wanted = torch.autograd.grad(total * times / world, params, allow_unused=True)
        for param, mean in zip(params, wanted, strict=True):
            assert (param.grad is None) == (mean is None), f"step {step}: a gradient got lost"
            if mean is not None:
                torch.testing.assert_close(param.grad, mean, rtol=1e-4, atol=1e-6)


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@widths
def test_a_parameter_of_two_wrappers_in_one_backward_is_reduced_once(
    size: str, backend: str, options: dict[str, Any], inside: bool
) -> None:
    run_ranks(2, check_shared, size, options, inside, backend=backend)


class Recomputed(Headed):
    """The body last in forward; from some step on also first, in a backward inside backward."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__(body, width)
        self.stem = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, nested: bool = False) -> torch.Tensor:
        x = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True) if nested else x
        return self.head(self.body(torch.tanh(self.stem(x))))


def check_parts(rank: int, world: int) -> None:
    width, cap = WIDTHS["small"]
    torch.manual_seed(5)
    body = nn.Linear(width, width)
    models = [Recomputed(body, width), Headed(body, width)]
    first, second = (phalanx.DistributedDataParallel(model, bucket_cap_mb=cap) for model in models)
    for step in range(4):
        for model in models:
            model.zero_grad()
        x = data(step, rank, width)
        loss = first(x, step > 1).square().mean() + second(x).square().mean()
        if step == 2:  # the first has sent the plain part when the second gets the nested one
            with pytest.raises(ReductionError, match=r"'body\.(weight|bias)' belongs to two.*a part of its gradient"):
                loss.backward()
            continue
        loss.backward()
        inputs = [data(step, other, width) for other in range(world)]
        total = sum(models[0](each, step > 1).square().mean() + models[1](each).square().mean() for each in inputs)
        got = body.weight.grad
        for model in models:
            model.zero_grad()
        (total / world).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(got, body.weight.grad, rtol=1e-4, atol=1e-6)


def test_two_wrappers_that_got_a_part_of_a_gradient_each_say_so() -> None:
    run_ranks(2, check_parts)


class WithLateStem(Headed):
    """A layer of its own, in the bucket of the body, that also gets gradient in a backward inside backward."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__(body, width)
        self.stem, self.foot, self.top = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, nested: bool = False) -> torch.Tensor:
        x = checkpoint(self.stem, x.clone().requires_grad_(), use_reentrant=True) if nested else x
        return self.top(self.head(self.stem(torch.tanh(self.body(self.foot(x))))))


def check_late_beside_shared(rank: int, world: int) -> None:
    width, _ = WIDTHS["small"]
    torch.manual_seed(5)
    body = nn.Linear(width, width)
    # The second, whose forward comes last, is the first to pack the body, and to give it its mean.
    models = [WithLateStem(body, width) for _ in range(2)]
    # Two layers per bucket: the stem, for which gradient comes late, travels with the shared body.
    first, second = (phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0022) for model in models)
    params = list(dict.fromkeys([*models[0].parameters(), *models[1].parameters()]))
    for step in range(4):
        for param in params:
            param.grad = None
        x = data(step, rank, width)
        (first(x, step > 1).square().mean() + second(x).square().mean()).backward()
        if step == 0:
            names = [{first.plan.specs[slot.param].name for slot in bucket.slots} for bucket in first.plan.buckets]
            assert any({"stem.weight", "body.weight"} <= together for together in names[:-1]), names
        got = [param.grad for param in params]
        for param in params:
            param.grad = None
        for each in (data(step, other, width) for other in range(world)):
            loss = models[0](each, step > 1).square().mean() + models[1](each).square().mean()
            (loss / world).backward()
        for param, grad in zip(params, got, strict=True):
            assert grad is not None, f"step {step}: a gradient got lost"
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)


def test_a_late_part_leaves_alone_what_another_wrapper_has_given() -> None:
    run_ranks(2, check_late_beside_shared)


def wrap_anew(rank: int, world: int) -> tuple[int, int, int]:
    """How many gradients are packed on arrival: with an old wrapper around, when it has gone, and when one has come."""
    model = nn.Sequential(nn.Linear(144, 144), nn.Linear(144, 144))
    old = phalanx.DistributedDataParallel(model)
    new = phalanx.DistributedDataParallel(model)
    counts = [sum(new.reducer.layout.is_large)]
    del old
    gc.collect()
    new(data(0, rank, 144)).square().mean().backward()
    counts.append(sum(new.reducer.layout.is_large))
    other = phalanx.DistributedDataParallel(model[1])
    new(data(1, rank, 144)).square().mean().backward()
    counts.append(sum(new.reducer.layout.is_large))
    assert other.reducer.layout.is_large == bytearray(2)
    return counts[0], counts[1], counts[2]


def test_parameters_are_shared_for_as_long_as_there_is_another_wrapper() -> None:
    assert run_ranks(2, wrap_anew) == [(0, 2, 1)] * 2
