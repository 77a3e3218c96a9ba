"""How a mean becomes `.grad`: as a copy, a view or the bucket's own memory; nobody can tell, whatever he does with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx.comm import hooks
from tests.cluster import run_ranks
from tests.ddp.by_hand import assert_mean, everywhere, inputs, mean_by_hand, unwrapped, widths

pytestmark = pytest.mark.covering(1)

WIDTH = 256  # a weight of 256 KiB, large enough for its mean to be given out as the bucket's own memory


def make(rank: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()


def settle(model: nn.Module, rank: int) -> None:
    """Two steps: afterwards the plan stands, and memory of buckets has been given out once."""
    for step in range(2):
        model.zero_grad()
        backward(model, rank, step)


def keeps_gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    for step in range(4):
        model.zero_grad()
        backward(model, rank, 10 + step)
        held += [param.grad for param in model.parameters()]
    return held


def keeps_views_of_gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    for step in range(3):
        model.zero_grad()
        backward(model, rank, 10 + step)
        held += [param.grad.view(-1)[5:] for param in model.parameters()]
    return held


def zeroes_in_place(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    backward(model, rank, 9)
    same = [param.grad for param in model.parameters()]
    for step in range(3):
        model.zero_grad(set_to_none=False)
        backward(model, rank, 10 + step)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), same, strict=True))
    return same


def gives_gradients_a_place(model: nn.Module, rank: int) -> list[torch.Tensor]:
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    for step in range(2):
        flat.zero_()
        backward(model, rank, 10 + step)
    return [flat]


def catches_gradients_in_a_hook(model: nn.Module, rank: int) -> list[torch.Tensor]:
    caught: list[torch.Tensor] = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: caught.append(p.grad)) for p in model.parameters()]
    model.zero_grad()
    backward(model, rank, 10)
    for handle in handles:
        handle.remove()
    return sorted(caught, key=torch.Tensor.numel, reverse=True)[:2]


def keeps_what_autograd_made(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Hooks that run before a gradient is stored; the two ways in which it gets there."""
    caught: list[torch.Tensor] = []
    handles = [p.register_hook(caught.append) for p in model.parameters()]
    model.zero_grad()
    backward(model, rank, 10)
    backward(model, rank, 11)
    for handle in handles:
        handle.remove()
    return [*sorted(caught, key=torch.Tensor.numel, reverse=True)[:4], *(p.grad for p in model.parameters())]


def holds_the_gradient_of_one(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Of a gradient that is added to in place, and held by one other."""
    model.zero_grad()
    backward(model, rank, 9)
    held = [param.grad.detach() for param in model.parameters()]
    for step in range(2):
        backward(model, rank, 10 + step)
    return [*held, *(param.grad for param in model.parameters())]


def gives_up_midway(model: nn.Module, rank: int) -> list[torch.Tensor]:
    def give_up(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    first = next(model.parameters())
    handle = first.register_hook(give_up)
    model.zero_grad()
    with contextlib.suppress(KeyboardInterrupt):
        backward(model, rank, 9)
    handle.remove()
    for step in range(2):
        model.zero_grad()
        backward(model, rank, 10 + step)
    return [param.grad for param in model.parameters()]


def accumulates_over_reduced_backwards(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    for step in range(3):
        backward(model, rank, 10 + step)
    return [param.grad for param in model.parameters()]


def accumulates_without_sync(model: Any, rank: int) -> list[torch.Tensor]:
    for turn in range(2):
        model.zero_grad()
        with model.no_sync():
            backward(model, rank, 10 + turn)
        backward(model, rank, 20 + turn)
    return [param.grad for param in model.parameters()]


def resets_between_forward_and_backward(model: nn.Module, rank: int) -> list[torch.Tensor]:
    inputs = torch.full((4, WIDTH), 0.1 * (rank + 1))
    for _ in range(3):
        loss = model(inputs).square().mean()
        model.zero_grad()
        loss.backward()
    return [param.grad for param in model.parameters()]


HABITS = [
    keeps_gradients,
    keeps_views_of_gradients,
    zeroes_in_place,
    gives_gradients_a_place,
    catches_gradients_in_a_hook,
    keeps_what_autograd_made,
    holds_the_gradient_of_one,
    accumulates_over_reduced_backwards,
    accumulates_without_sync,
    resets_between_forward_and_backward,
]


def compare(rank: int, world: int, habit: Callable[[nn.Module, int], list[torch.Tensor]]) -> None:
    results = []
    for wrap in (phalanx.DistributedDataParallel, TorchDDP):
        model = wrap(make(rank), process_group=dist.new_group(backend="gloo") if wrap is TorchDDP else None)
        settle(model, rank)
        results.append(habit(model, rank))
        dist.barrier()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@everywhere
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_gradients_are_what_torch_gives_whatever_users_do_with_them(backend: str, habit: Any) -> None:
    run_ranks(2, compare, habit, backend=backend)


def watch_memory(rank: int, world: int) -> tuple[bool, bool, bool]:
    model = phalanx.DistributedDataParallel(make(rank))
    settle(model, rank)

    def place_of_gradient() -> int:
        model.zero_grad()
        backward(model, rank, 5)
        grad = next(model.parameters()).grad
        assert grad.untyped_storage().nbytes() > grad.nbytes, "part of a bucket"
        return grad.data_ptr()

    reused = place_of_gradient() == place_of_gradient()
    held = next(model.parameters()).grad
    moved = place_of_gradient() != held.data_ptr()
    del held
    again = place_of_gradient() == place_of_gradient()
    return reused, moved, again


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    assert run_ranks(2, watch_memory) == [(True, True, True)] * 2


class Sometimes(nn.Module):
    """Whether the second layer is used is set from outside; both gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses_both = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.always(inputs)
        return found + self.sometimes(inputs) if self.uses_both else found


def leave_unused(rank: int, world: int, keep: bool) -> None:
    """A gradient of the step before, of a parameter that no rank uses now, with and without another holder."""
    torch.manual_seed(3)
    model = phalanx.DistributedDataParallel(Sometimes(), on_unused="ignore")
    for first in (0, 1):
        model.module.uses_both = True
        model.zero_grad()
        backward(model, rank, first)
        # What a rank makes of it is its own business, and must survive.
        for param in model.module.sometimes.parameters():
            param.grad = param.grad * (1.0 + rank / 7)
        held = [param.grad for param in model.module.sometimes.parameters()]
        before = [grad.clone() for grad in held]
        if not keep:
            del held
        model.module.uses_both = False
        backward(model, rank, 2 + first)
        after = [param.grad for param in model.module.sometimes.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        del after


@everywhere
@pytest.mark.parametrize("keep", [False, True])
def test_a_gradient_that_no_rank_uses_now_stays_to_the_bit(backend: str, keep: bool) -> None:
    run_ranks(3, leave_unused, keep, backend=backend)


def watch_backward(rank: int, world: int) -> tuple[int, int]:
    """Large gradients that have memory of their own while the last one is made: in the first backward, and in the third."""
    torch.manual_seed(3)
    model = phalanx.DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))))
    found = []

    def look(_grad: torch.Tensor) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found.append(sum(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads))

    next(model.parameters()).register_hook(look)
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step)
    return found[0], found[2]


@everywhere
def test_gradients_are_freed_while_backward_goes_on(backend: str) -> None:
    assert run_ranks(2, watch_backward, backend=backend) == [(5, 0)] * 2


def recover(rank: int, world: int) -> list[torch.Tensor]:
    model = phalanx.DistributedDataParallel(make(rank))
    settle(model, rank)
    return gives_up_midway(model, rank)


@everywhere
def test_a_backward_given_up_midway_leaves_nothing_in_the_next(backend: str) -> None:
    expected = run_ranks(2, alone_after_giving_up)
    for ours in run_ranks(2, recover, backend=backend):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected[0], strict=True))


def alone_after_giving_up(rank: int, world: int) -> list[torch.Tensor]:
    model = phalanx.DistributedDataParallel(make(rank))
    settle(model, rank)
    model.zero_grad()
    backward(model, rank, 11)
    return [param.grad for param in model.parameters()]


def differ(rank: int, world: int) -> list[torch.Tensor]:
    """Only rank 0 keeps what it was given: the ranks then reduce in different memory."""
    model = phalanx.DistributedDataParallel(make(rank))
    settle(model, rank)
    held = []
    for step in range(4):
        model.zero_grad()
        backward(model, rank, 10 + step)
        if rank == 0:
            held.append(next(model.parameters()).grad)
    assert len({grad.data_ptr() for grad in held}) == len(held)
    return [param.grad.clone() for param in model.parameters()]


@everywhere
def test_ranks_may_differ_in_what_they_keep(backend: str) -> None:
    first, second = run_ranks(2, differ, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Crossed(nn.Module):
    """Used in the order of registration reversed, so that the observed order asks for another plan."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


def replace_plan(rank: int, world: int) -> tuple[bool, bool]:
    """Whether the plan was replaced, and whether every old bucket was gone before a new one took memory."""
    model = phalanx.DistributedDataParallel(Crossed(), bucket_cap_mb=0.1)
    reducer = model.reducer
    old, plan = [weakref.ref(bucket) for bucket in reducer.buckets], reducer.plan.hash
    alive: list[int] = []
    allocate = reducer.strategy.allocate

    def watched(*args: Any) -> torch.Tensor:
        if reducer.plan.hash != plan:
            alive.append(sum(bucket() is not None for bucket in old))
        return allocate(*args)

    reducer.strategy.allocate = watched
    for step in range(2):
        model.zero_grad()
        backward(model, rank, step)
    return reducer.plan.hash != plan, alive == [0] * len(reducer.buckets)


@pytest.mark.parametrize("world", [1, 3])
def test_buckets_of_a_replaced_plan_are_freed_before_new_ones_take_memory(world: int) -> None:
    assert run_ranks(world, replace_plan) == [(True, True)] * world


# -- with a hook -----------------------------------------------------------------------------------


def keep_beside_a_hook(rank: int, world: int, width: int, name: str) -> list[str]:
    """The names of the gradients that a later step has overwritten."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model = phalanx.DistributedDataParallel(layers, bucket_cap_mb=(width + 1) * width * 4 / 2**20)  # a bucket per layer
    model.register_comm_hook(None, getattr(hooks, name))
    kept = []
    for step in range(5):
        model.zero_grad()
        model(inputs(step, rank, width)).square().mean().backward()
        kept += [(f"step {step}: {n}", p.grad, p.grad.clone()) for n, p in layers.named_parameters()]
    return [name for name, grad, copy in kept if not torch.equal(grad, copy)]


@everywhere
@widths
@pytest.mark.parametrize("name", ["allreduce_hook", "bf16_compress_hook"])
def test_a_gradient_that_is_kept_beside_a_hook_is_not_overwritten(name: str, width: int, backend: str) -> None:
    assert run_ranks(2, keep_beside_a_hook, width, name, backend=backend) == [[], []]


# -- moved by the user -----------------------------------------------------------------------------


def replace_each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def replace(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = change(param.grad)

    return replace


def assign_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data = torch.zeros_like(param)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "clones": replace_each(torch.clone),
    "data": assign_data,
}


class Convolved(nn.Module):
    """A small convolution, and one whose weight has more than 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.small, self.large = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 256, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x))


def move(rank: int, world: int, how: str, views: bool, zeroed: str) -> None:
    """Gradients are there when the model is moved, and zeroed afterwards, or not at all."""
    model = Convolved()
    plain = unwrapped(model)
    wrapped = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=0.05)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(2, 3, 6, 6, generator=generator)
        return model(x.to(next(model.parameters()).dtype)).square().mean()

    for step in range(4):
        wrapped.zero_grad()
        if step == 2:
            loss(wrapped, 20, rank).backward()
            MOVES[how](wrapped)
            MOVES[how](plain) if how not in ("clones", "data") else None
            wrapped.zero_grad(set_to_none=zeroed == "to none")
        loss(wrapped, step, rank).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss(m, step, r)))
        # Fused optimizers go by memory: they would step every weight by the gradient of another one.
        assert all(param.grad is not None and param.grad.stride() == param.stride() for param in model.parameters())


@everywhere
@pytest.mark.parametrize("zeroed", ["to none", "to zeros"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("how", MOVES)
def test_a_model_may_be_moved_while_it_has_gradients(how: str, views: bool, zeroed: str, backend: str) -> None:
    run_ranks(2, move, how, views, zeroed, backend=backend)


def swaps_gradients(rank: int, world: int, width: int, cap_mb: float | None, num_wrappers: int, detached: bool) -> None:
    """In view mode, to the same bucket and to another; what is accumulated next is added to what is there now."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    plain = unwrapped(model)
    parts = [model] if num_wrappers == 1 else [model[:2], model[2:]]
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": cap_mb}
    wrapped = nn.Sequential(*(phalanx.DistributedDataParallel(part, **options) for part in parts))
    held: list[torch.Tensor] = []
    for step in range(4):
        wrapped(inputs(step, rank, width)).square().mean().backward()
        new = mean_by_hand(plain, world, lambda m, r, step=step: m(inputs(step, r, width)).square().mean())
        held = [a + b for a, b in zip(held or [torch.zeros(())] * len(new), new, strict=True)]
        assert_mean(model, held)
        weights = [layer.weight for layer in model]
        for first, second in ((0, 3), (1, 2)):
            moved = [weights[second].grad, weights[first].grad]
            weights[first].grad, weights[second].grad = [grad.detach() for grad in moved] if detached else moved
            del moved
            held[2 * first], held[2 * second] = held[2 * second], held[2 * first]
        # And one that is left without: the next gradient of its own is packed where another parameter's lies.
        weights[0].grad, weights[1].grad = weights[1].grad.detach() if detached else weights[1].grad, None
        held[0], held[2] = held[2], torch.zeros_like(held[2])


@everywhere
@widths
@pytest.mark.parametrize("detached", [False, True], ids=["tensors", "tensors of the same memory"])
@pytest.mark.parametrize("layout", [(None, 1), (1e-4, 1), (None, 2)], ids=["one bucket", "buckets", "wrappers"])
def test_views_that_users_swap_between_parameters_stay_apart(
    layout: tuple[Any, int], detached: bool, width: int, backend: str
) -> None:
    run_ranks(2, swaps_gradients, width, *layout, detached, backend=backend)


def holds_views(rank: int, world: int) -> bool:
    """Views that a user holds are where the next mean is found, as in torch: no other memory is taken for their sake."""
    wrapped = phalanx.DistributedDataParallel(nn.Linear(200, 200), gradient_as_bucket_view=True)
    for step in range(2):  # the plan settles
        wrapped(inputs(step, rank, 200)).square().mean().backward()
    held = [param.grad.detach() for param in wrapped.parameters()]
    wrapped(inputs(2, rank, 200)).square().mean().backward()
    return all(torch.equal(view, param.grad) for view, param in zip(held, wrapped.parameters(), strict=True))


@everywhere
def test_views_that_users_hold_see_the_next_mean(backend: str) -> None:
    assert run_ranks(2, holds_views, backend=backend) == [True, True]
