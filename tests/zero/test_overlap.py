"""Steps made during backward: when they happen, what they cost, and everything that must not be lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm import hooks
from phalanx.zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from phalanx.zero.overlap.reduce_scatter import ReduceScatter
from tests.cluster import ClusterFailure, run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

everywhere = pytest.mark.parametrize("backend", ["gloo", "phalanx"])
CAP_MB = 0.0025


def made(model: nn.Module, make: Any = optim.AdamW, wrap_first: bool = True, **options: Any) -> tuple[Any, Any]:
    def wrap() -> Any:
        return phalanx.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, on_unused="ignore")

    wrapped = wrap() if wrap_first else None
    zero = ZeroRedundancyOptimizer(model.parameters(), make, overlap_with_ddp=True, lr=0.01, **options)
    return wrapped or wrap(), zero


def made_in_either_order(rank: int, world: int) -> list[Any]:
    found = []
    for wrap_first in (True, False):
        plain_model, model = Given(), Given()
        plain = optim.AdamW(plain_model.parameters(), lr=0.01)
        wrapped, zero = made(model, wrap_first=wrap_first)
        for step in range(4):
            set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
            plain.step()
            zero.zero_grad()
            # Nobody calls step(): backward makes it, from the first one on.
            wrapped(own_gradients(model, step, rank, world)).backward()
            found.append(differing(model, sample(plain_model)))
    return found


def test_every_backward_is_an_update_whichever_is_made_first() -> None:
    assert run_ranks(2, made_in_either_order) == [[[]] * 8] * 2


# -- accumulation ----------------------------------------------------------------------------------


def accumulate(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    plain_model, model = Given(), Given()
    plain = optim.AdamW(plain_model.parameters(), lr=0.01)
    wrapped, zero = made(model, **options)
    found = []
    for update in range(4):
        params = list(plain_model.parameters())
        for param in params:
            param.grad = None
        zero.zero_grad()
        for micro in range(3):
            step = 3 * update + micro
            for param, mean in zip(params, mean_gradients(plain_model, step), strict=True):
                if mean is not None:
                    param.grad = mean.clone() if param.grad is None else param.grad + mean
            given = own_gradients(model, step, rank, world)
            if micro < 2:
                with wrapped.no_sync():
                    wrapped(given).backward()
            else:
                wrapped(given).backward()
        plain.step()
        zero.step()
        found.append(differing(model, sample(plain_model)))
    return found


@everywhere
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_accumulation_under_no_sync(options: dict[str, Any], backend: str) -> None:
    assert run_ranks(2, accumulate, options, backend=backend) == [[[]] * 4] * 2


def accumulate_reduced(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """Two reduced backwards for one step, as without no_sync()."""
    plain_model, model = Given(), Given()
    plain = optim.AdamW(plain_model.parameters(), lr=0.01)
    wrapped, zero = made(model, step_in_backward=False, **options)
    found = []
    for update in range(3):
        params = list(plain_model.parameters())
        means = [mean_gradients(plain_model, 3 * update + micro) for micro in range(2)]
        set_gradients(params, [a + b for a, b in zip(*means, strict=True)])  # type: ignore[operator]
        plain.step()
        zero.zero_grad()
        for micro in range(2):
            wrapped(own_gradients(model, 3 * update + micro, rank, world)).backward()
        zero.step()
        found.append(differing(model, sample(plain_model)))
    return found


@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"partition": "parameter"}], ids=str)
def test_accumulation_of_reduced_gradients_where_step_comes_later(options: dict[str, Any]) -> None:
    assert run_ranks(2, accumulate_reduced, options) == [[[]] * 3] * 2


def use_twice(rank: int, world: int, options: dict[str, Any]) -> None:
    model = Given()
    wrapped, _zero = made(model, **options)
    wrapped(own_gradients(model, 0, rank, world)).backward()
    with pytest.raises(RuntimeError, match=r"have not been zeroed|stage=2 has freed"):
        wrapped(own_gradients(model, 1, rank, world)).backward()


@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"partition": "parameter"}], ids=str)
def test_a_gradient_that_made_an_update_is_not_silently_used_in_another(options: dict[str, Any]) -> None:
    run_ranks(2, use_twice, options)


LARGE_SHAPES = ((70,), (20000,), (13, 10), (150, 150))  # on both sides of 64 KiB


def zero_in_place(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """Gradients are set to zero, not to None: with momentum and decay that is another update than None."""
    plain_model, model = Given(LARGE_SHAPES), Given(LARGE_SHAPES)
    plain = optim.SGD(plain_model.parameters(), lr=0.01, momentum=0.9)
    wrapped, zero = made(model, optim.SGD, momentum=0.9, **options)
    found = []
    for step in range(5):
        plain.zero_grad(set_to_none=False)
        zero.zero_grad(set_to_none=False)
        means, own = mean_gradients(plain_model, step), own_gradients(model, step, rank, world)
        if step == 3:
            means[1] = own[1] = None  # used by no rank: its gradient stays zero, and its momentum goes on
        for param, mean in zip(plain_model.parameters(), means, strict=True):
            if mean is not None:
                param.grad = mean.clone() if param.grad is None else param.grad + mean
        plain.step()
        wrapped(own).backward()
        if not options.get("step_in_backward", True):
            zero.step()
        found.append(differing(model, sample(plain_model)))
    return found


@everywhere
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_gradients_may_be_zeroed_in_place(options: dict[str, Any], backend: str) -> None:
    assert run_ranks(2, zero_in_place, options, backend=backend) == [[[]] * 5] * 2


def freed_by_step(rank: int, world: int) -> list[bool]:
    """With a hook means are whole; in the second stage they are gone after the update, in the first step and later."""
    model = Given(LARGE_SHAPES)
    wrapped, zero = made(model, optim.SGD, stage=2)
    wrapped.register_comm_hook(None, hooks.allreduce_hook)
    found = []
    for step in range(3):
        zero.zero_grad(set_to_none=False)
        wrapped(own_gradients(model, step, rank, world)).backward()
        found.append(all(param.grad is None for param in model.parameters()))
    return found


@everywhere
def test_whole_gradients_of_the_second_stage_are_freed_in_every_step(backend: str) -> None:
    assert run_ranks(2, freed_by_step, backend=backend) == [[True] * 3] * 2


def step_without_reduction(rank: int, world: int, options: dict[str, Any]) -> None:
    model = Given()
    wrapped, zero = made(model, **options)
    wrapped(own_gradients(model, 0, rank, world)).backward()
    zero.step()
    zero.zero_grad()
    with wrapped.no_sync():
        wrapped(own_gradients(model, 1, rank, world)).backward()
    with pytest.raises(RuntimeError, match="no backward has"):
        zero.step()


@pytest.mark.parametrize("options", [{}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_a_step_without_a_reduced_backward_is_refused(options: dict[str, Any]) -> None:
    run_ranks(2, step_without_reduction, options)


# -- when, and how much ----------------------------------------------------------------------------


def watch_order(rank: int, world: int) -> list[str]:
    model = Given(((600,), (600,), (600,), (600,)))
    wrapped, zero = made(model)
    events: list[str] = []
    zero.optim.register_step_pre_hook(lambda *_: events.append("update"))
    for number, param in enumerate(model.parameters()):
        param.register_hook(lambda _, number=number: events.append(f"gradient {number}"))
    for step in (0, 1, 3):
        events.clear()
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world)).backward()
    return events


@everywhere
def test_buckets_are_updated_while_later_gradients_are_still_to_come(backend: str) -> None:
    for events in run_ranks(2, watch_order, backend=backend):
        gradients = [at for at, event in enumerate(events) if event.startswith("gradient")]
        assert events.count("update") >= 2
        assert events.index("update") < gradients[-1], events


def count_traffic(rank: int, world: int) -> dict[str, int]:
    model = Given(((300,), (301,), (299,), (40, 30)))
    wrapped, zero = made(model)
    for step in (0, 1):
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world)).backward()
    moved = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "broadcast"), 0)
    transports = {id(c): c for c in (zero._sharded.collectives, wrapped.collectives)}
    for collectives in transports.values():
        for verb in moved:
            kept = getattr(collectives, verb)

            def call(first: torch.Tensor, *rest: Any, kept: Any = kept, verb: str = verb) -> Any:
                whole = rest[0] if verb == "reduce_scatter" else first
                moved[verb] += whole.numel() * whole.element_size()
                return kept(first, *rest)

            setattr(collectives, verb, call)
    zero.zero_grad()
    wrapped(own_gradients(model, 3, rank, world)).backward()
    moved["total"] = sum(p.numel() * p.element_size() for p in model.parameters())
    moved["buckets"] = len(wrapped.reducer.buckets)
    return moved


@everywhere
def test_traffic_is_that_of_plain_data_parallelism(backend: str) -> None:
    for moved in run_ranks(2, count_traffic, backend=backend):
        padding = 8 * moved["buckets"]
        # A reduce-scatter and a gather of everything cost as much as one all-reduce of it; what is left are the tails.
        assert moved["total"] <= moved["reduce_scatter"] <= moved["total"] + padding
        assert moved["total"] <= moved["all_gather"] <= moved["total"] + padding
        assert moved["all_reduce"] < 2000 * moved["buckets"] and moved["broadcast"] == 0


# -- hooks -----------------------------------------------------------------------------------------


def with_hook(rank: int, world: int, name: str, when: str) -> Any:
    plain_model, model = Given(), Given()
    plain = optim.AdamW(plain_model.parameters(), lr=0.01)
    hook = getattr(hooks, name)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, on_unused="ignore")
    if when == "before":
        wrapped.register_comm_hook(None, hook)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, overlap_with_ddp=True, lr=0.01)
    constructors = {"step": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
    if when in constructors:
        wrapped.register_comm_hook(None, constructors[when](hook, wrapped, zero, shard_buckets=True))
    elif when == "after":
        wrapped.register_comm_hook(None, hook)
    found = []
    for step in range(4):
        set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step, most=8))
        plain.step()
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world, most=8)).backward()
        found.append(differing(model, sample(plain_model)))
    return found, isinstance(wrapped.reducer.strategy, ReduceScatter)


@pytest.mark.parametrize("when", ["before", "after", "step", "interleaved"])
@pytest.mark.parametrize("name", ["allreduce_hook", "bf16_compress_hook"])
def test_communication_hooks_and_torchs_two_constructors(name: str, when: str) -> None:
    scatters = name == "allreduce_hook" and when in ("step", "interleaved")
    assert run_ranks(2, with_hook, name, when) == [([[]] * 4, scatters)] * 2


def change_gradients_early(rank: int, world: int, in_backward: bool) -> list[list[int]]:
    """A step hook that changes gradients, where a user's hook leaves whole ones."""
    plain_model, model = Given(), Given()
    plain = optim.SGD(plain_model.parameters(), lr=0.01)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, on_unused="ignore")
    wrapped.register_comm_hook(None, hooks.allreduce_hook)
    options = {"overlap_with_ddp": True, "step_in_backward": in_backward, "lr": 0.01}
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, **options)

    def halve(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        torch._foreach_mul_(grads, 0.5)

    for one in (plain, zero):
        one.register_step_pre_hook(halve)
    found = []
    for step in range(4):
        set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
        plain.step()
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world)).backward()
        zero.step()
        found.append(differing(model, sample(plain_model)))
    return found


def test_a_step_hook_changes_all_gradients_or_is_told_that_it_comes_too_early() -> None:
    assert run_ranks(2, change_gradients_early, False) == [[[]] * 4] * 2
    with pytest.raises(ClusterFailure, match="a hook that runs before the step has changed the gradient of"):
        run_ranks(2, change_gradients_early, True)


def wrong_constructors(rank: int, world: int) -> None:
    model = Given()
    wrapped, zero = made(model)
    alone = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(hooks.allreduce_hook, wrapped, alone)
    with pytest.raises(TypeError, match="takes a phalanx"):
        hook_with_zero_step(hooks.allreduce_hook, model, zero)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another wrapper"):
        hook_with_zero_step(hooks.allreduce_hook, phalanx.DistributedDataParallel(Given()), zero)


def test_constructors_of_hooks_refuse_what_does_not_belong_together() -> None:
    run_ranks(2, wrong_constructors)


# -- precision, failures ---------------------------------------------------------------------------


def low_precision(rank: int, world: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    build = [nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4)) for _ in range(2)]
    build[1].load_state_dict(build[0].state_dict())
    config = phalanx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = [phalanx.DistributedDataParallel(model, mixed_precision=config, bucket_cap_mb=CAP_MB) for model in build]
    plain = optim.AdamW(build[0].parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(build[1].parameters(), optim.AdamW, overlap_with_ddp=True, lr=0.01, **options)
    found = []
    for step in range(5):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, one in zip(wrapped, (plain, zero), strict=True):
            one.zero_grad()
            model(x).float().square().mean().backward()
            one.step()
        found.append(differing(build[1], sample(build[0])))
    return found, {p.dtype for p in build[1].parameters()}


@everywhere
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"partition": "parameter"}, {"step_in_backward": False}], ids=str)
def test_overlapped_with_mixed_precision(options: dict[str, Any], backend: str) -> None:
    assert run_ranks(2, low_precision, options, backend=backend) == [([[]] * 5, {torch.float32})] * 2


class Breaking(torch.autograd.Function):
    """Raises in backward, when armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Breaking.armed:
            raise ArithmeticError("broken on purpose")
        return grad


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                x = Breaking.apply(x)
        return x


def tear(rank: int, world: int) -> str:
    Breaking.armed = False
    model = Fragile()
    wrapped, zero = made(model)
    for _ in range(2):
        zero.zero_grad()
        wrapped(torch.ones(2, 20)).sum().backward()
    Breaking.armed = True
    zero.zero_grad()
    with pytest.raises(ArithmeticError):
        wrapped(torch.ones(2, 20)).sum().backward()
    Breaking.armed = False
    with pytest.raises(RuntimeError, match="between two steps") as caught:
        wrapped(torch.ones(2, 20)).sum().backward()
    return str(caught.value)


def test_a_backward_that_raised_amid_its_updates_is_remembered() -> None:
    for text in run_ranks(2, tear):
        assert "Load a checkpoint" in text


class Recomputed(nn.Module):
    """A weight used in two checkpointed parts, so that it gets gradient twice, the second time late."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(20, 20), nn.Linear(20, 20)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.shared, x, use_reentrant=self.reentrant))


def recompute(rank: int, world: int, reentrant: bool) -> Any:
    torch.manual_seed(5)
    models = [Recomputed(reentrant), Recomputed(reentrant)]
    models[1].load_state_dict(models[0].state_dict())
    plain_wrapped = phalanx.DistributedDataParallel(models[0], bucket_cap_mb=CAP_MB)
    plain = optim.AdamW(models[0].parameters(), lr=0.01)
    wrapped, zero = made(models[1])
    found = []
    for step in range(5):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
        for model, one in ((plain_wrapped, plain), (wrapped, zero)):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
        found.append(differing(models[1], sample(models[0])))
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_a_shared_layer(reentrant: bool) -> None:
    assert run_ranks(2, recompute, reentrant) == [[[]] * 5] * 2


def alone_after(rank: int, world: int) -> Any:
    """A second optimizer takes the place of the first, which is let go."""
    plain_model, model = Given(), Given()
    plain = optim.SGD(plain_model.parameters(), lr=0.01)
    wrapped, zero = made(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.01)
    found = []
    for step in range(3):
        set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
        plain.step()
        zero.zero_grad()
        wrapped(own_gradients(model, step, rank, world)).backward()
        found.append(differing(model, sample(plain_model)))
    dist.barrier()
    return found


def test_a_second_optimizer_takes_the_place_of_the_first() -> None:
    assert run_ranks(2, alone_after) == [[[]] * 3] * 2


def buckets_by_caps(rank: int, world: int, given: dict[str, Any]) -> int:
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))  # 5.5 MiB
    wrapped = phalanx.DistributedDataParallel(model, **given)
    phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    return len(wrapped.plan.buckets)


@pytest.mark.parametrize(("given", "expected"), [({}, 1), ({"bucket_cap_mb": 3}, 2), ({"bucket_cap_mb_list": [3]}, 2)])
def test_buckets_are_widened_unless_a_size_was_asked_for(given: dict[str, Any], expected: int) -> None:
    assert run_ranks(2, buckets_by_caps, given) == [expected] * 2
