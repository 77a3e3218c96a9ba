"""A backward that raises midway: on all ranks training goes on, on some every rank hears of it, and nobody hangs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState as TorchPowerSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook as torch_powerSGD_hook

import phalanx
from phalanx.comm.hooks import Int8State, PowerSGDState, TopKState, allreduce_hook, int8_hook, powerSGD_hook, topk_hook
from tests.cluster import run_ranks
from tests.ddp.by_hand import (
    SMALL,
    Breaks,
    BrokenLayer,
    alike,
    assert_mean,
    everywhere,
    inputs,
    mean_by_hand,
    unwrapped,
    widths,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

DEPTH = 5


class Deep(nn.Module):
    """The backward raises before it reaches layer `breaks_at`; the later ones have their gradients by then."""

    def __init__(self, width: int, words: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(DEPTH))
        self.words = nn.Embedding(30, width, sparse=True) if words else None
        self.breaks_at: int | None = None

    def forward(self, x: torch.Tensor, depth: int = DEPTH) -> torch.Tensor:
        for number, layer in enumerate(self.layers[:depth]):
            x = torch.tanh(layer(x))
            if self.words is not None and number in (0, DEPTH - 1):
                x = x + self.words(torch.arange(4) + number)
            if number == self.breaks_at:
                x = Breaks.apply(x)
        return x


def loss_of(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    return model(inputs(step, rank, width)).square().mean()


def break_once(wrapped: Any, rank: int, width: int, breaks_at: int, step: int = 50) -> None:
    wrapped.module.breaks_at = breaks_at
    with pytest.raises(BrokenLayer):
        loss_of(wrapped, step, rank, width).backward()
    wrapped.module.breaks_at = None


WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "hook": {"hook": True},
    "sparse": {"words": True},
    "static graph": {"static_graph": True},
}


def made(width: int, way: str) -> tuple[Deep, nn.Module, Any]:
    options = dict(WAYS[way])
    hook, words = options.pop("hook", False), options.pop("words", False)
    model = Deep(width, words)
    plain = unwrapped(model)
    # A bucket per layer: where the backward raises decides how many have left.
    cap_mb = (width + 1) * width * 4 / 2**20
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb, **options)
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    return model, plain, wrapped


def raise_everywhere(rank: int, world: int, width: int, way: str, to_none: bool) -> None:
    """In the first pass, amid training, and twice in a row; at another layer on each rank."""
    model, plain, wrapped = made(width, way)
    for step in range(5):
        for turn in range({0: 1, 3: 1, 4: 2}.get(step, 0)):
            wrapped.zero_grad(set_to_none=to_none)
            break_once(wrapped, rank, width, 1 + rank * (2 - turn))
        wrapped.zero_grad(set_to_none=to_none)
        loss_of(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss_of(m, step, r, width)))


@everywhere
@widths
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zeros"])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_raises_on_all_ranks_leaves_nothing_in_the_next(
    way: str, to_none: bool, width: int, backend: str
) -> None:
    run_ranks(2, raise_everywhere, width, way, to_none, backend=backend)


def num_left_early(rank: int, world: int) -> int:
    """How many buckets have left when the first layer gets its gradient, after a first pass that raised."""
    model, _, wrapped = made(SMALL, "static graph")
    break_once(wrapped, rank, SMALL, 1)
    loss_of(wrapped, 0, rank, SMALL).backward()
    num: list[int] = []
    model.layers[0].weight.register_hook(lambda _: num.append(wrapped.reducer.under_way.next))
    loss_of(wrapped, 1, rank, SMALL).backward()
    return num[0]


def test_buckets_of_a_static_graph_leave_early_though_the_first_backward_raised() -> None:
    assert min(run_ranks(2, num_left_early)) >= DEPTH - 2


def raise_before_the_first_gradient(rank: int, world: int, width: int, way: str) -> None:
    """Rank 1 reaches its output and no parameter, or of a static graph no bucket's last one; rank 0 gets further."""
    model, plain, wrapped = made(width, way)
    for step in range(4):
        if step in (0, 2):
            wrapped.zero_grad()
            break_once(wrapped, rank, width, DEPTH - 1 if rank == 1 else 1)
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss_of(m, step, r, width)))


@everywhere
@widths
@pytest.mark.parametrize("way", ["copies", "views", "static graph"])
def test_some_of_the_ranks_may_have_raised_before_their_first_gradient(way: str, width: int, backend: str) -> None:
    run_ranks(2, raise_before_the_first_gradient, width, way, backend=backend)


def not_zeroed(rank: int, world: int, width: int, views: bool) -> None:
    """Nobody zeroes: the gradients of the last good backward, which the broken one had not reached, are still there."""
    model, plain, wrapped = made(width, "views" if views else "copies")
    for step in range(2):
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
    kept = [param.grad.clone() for param in model.layers[0].parameters()]
    break_once(wrapped, rank, width, 1)
    if not views:
        assert all(map(torch.equal, kept, (param.grad for param in model.layers[0].parameters())))
    wrapped.zero_grad()
    loss_of(wrapped, 2, rank, width).backward()
    assert_mean(model, mean_by_hand(plain, world, lambda m, r: loss_of(m, 2, r, width)))


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_that_a_broken_backward_did_not_reach_are_still_there(views: bool, width: int, backend: str) -> None:
    run_ranks(2, not_zeroed, width, views, backend=backend)


def zeroed_alike(rank: int, world: int, width: int, views: bool) -> None:
    """Every rank had every gradient, and got to another layer before it raised: afterwards every rank has every gradient.

    Else a parameter that nobody uses next is stepped on one rank, by weight decay, and not on the other.
    """
    model, _, wrapped = made(width, "views" if views else "copies")
    for step in range(2):
        wrapped.zero_grad(set_to_none=False)
        loss_of(wrapped, step, rank, width).backward()
    break_once(wrapped, rank, width, 1 + 2 * rank)
    wrapped.zero_grad(set_to_none=False)
    assert [name for name, param in model.named_parameters() if param.grad is None] == []
    assert not any(param.grad.count_nonzero() for param in model.parameters())


@everywhere
@widths
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_ranks_that_came_to_different_layers_have_the_same_gradients_to_zero(views: bool, width: int, backend: str) -> None:
    run_ranks(2, zeroed_alike, width, views, backend=backend)


def accumulated_before(rank: int, world: int, width: int) -> None:
    """A microbatch uses the last layer, the backward that raises and the one that follows it do not."""
    model, plain, wrapped = made(width, "copies")

    def part(module: Any, step: int, of: int, depth: int) -> torch.Tensor:
        return module(inputs(step, of, width), depth).square().mean()

    for step in range(2):
        wrapped.zero_grad()
        part(wrapped, step, rank, DEPTH).backward()
    wrapped.zero_grad()
    with wrapped.no_sync():
        part(wrapped, 2, rank, DEPTH).backward()
    model.breaks_at = 1
    with pytest.raises(BrokenLayer):
        part(wrapped, 3, rank, DEPTH - 1).backward()
    model.breaks_at = None
    part(wrapped, 4, rank, DEPTH - 1).backward()
    wanted = mean_by_hand(plain, world, lambda m, r: part(m, 2, r, DEPTH))
    for got, mean in zip(model.layers[-1].parameters(), wanted[-2:], strict=True):
        torch.testing.assert_close(got.grad, mean.to(got.dtype))
    assert all(alike(param.grad) for param in model.parameters())


@everywhere
@widths
def test_what_had_been_accumulated_before_a_backward_that_raised_is_reduced_by_the_next(width: int, backend: str) -> None:
    run_ranks(2, accumulated_before, width, backend=backend)


def decayed_alike(rank: int, world: int, width: int, overlapped: bool) -> None:
    """No rank had gradients; one got further than the other before both raised; the next backward uses fewer layers.

    What the broken backward left, zeroed, is there on one rank only: stepped by weight decay on that one, it drifted apart.
    """
    model, _, wrapped = made(width, "copies")
    settings = {"lr": 0.01, "weight_decay": 0.5}
    optimizer: Any
    if overlapped:
        optimizer = phalanx.ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, overlap_with_ddp=True, step_in_backward=False, **settings
        )
    else:
        optimizer = optim.AdamW(model.parameters(), **settings)
    for step in range(4):
        wrapped.zero_grad()
        if step == 2:
            break_once(wrapped, rank, width, 1 + 2 * rank)
            wrapped.zero_grad(set_to_none=False)
        wrapped(inputs(step, rank, width), 2 if step >= 2 else DEPTH).square().mean().backward()
        optimizer.step()
        assert all(alike(param.detach()) for param in model.parameters()), f"step {step}"


@everywhere
@widths
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_what_a_broken_backward_left_on_one_rank_is_stepped_on_all_or_none(
    overlapped: bool, width: int, backend: str
) -> None:
    run_ranks(2, decayed_alike, width, overlapped, backend=backend)


def raise_in_low_precision(rank: int, world: int, width: int) -> None:
    """The gradients that the reducer had taken are low, the parameters full again when it refuses the step."""
    low = phalanx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Deep(width)
    # A bucket per layer: what is taken when backward has ended is full again.
    cap_mb = 4e-6 * width * width
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb, mixed_precision=low, on_nonfinite="raise")
    for step in range(3):
        wrapped.zero_grad()
        loss = loss_of(wrapped, step, rank, width)
        if step == 1:
            with pytest.raises(phalanx.errors.ReductionError, match="NaN or infinite"):
                (loss * float("inf")).backward()
        else:
            loss.backward()
            assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@widths
def test_gradients_of_low_precision_are_given_back_to_full_parameters(width: int) -> None:
    run_ranks(2, raise_in_low_precision, width)


def raise_in_microbatch(rank: int, world: int, width: int) -> None:
    """In a backward that is not reduced: nothing had begun, so nothing has to be made good."""
    model, plain, wrapped = made(width, "copies")
    for step in range(3):
        wrapped.zero_grad()
        if rank == 0 and step == 1:
            with wrapped.no_sync():
                break_once(wrapped, rank, width, 2)
            wrapped.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss_of(m, step, r, width)))


@widths
def test_a_backward_that_raises_under_no_sync_concerns_nobody_else(width: int) -> None:
    run_ranks(2, raise_in_microbatch, width)


# -- on some ranks ---------------------------------------------------------------------------------


def raise_on_one(rank: int, world: int, width: int, way: str, at_step: int) -> tuple[str, float]:
    _, _, wrapped = made(width, way)
    for step in range(at_step):
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
    wrapped.zero_grad()
    started = time.monotonic()
    if rank == 1:
        break_once(wrapped, rank, width, 2, at_step)
    with pytest.raises(phalanx.PhalanxError) as raised:
        # The others are in the backward that rank 1 has left, and rank 1 hears of it at its next forward.
        loss_of(wrapped, at_step, rank, width).backward()
    return str(raised.value), time.monotonic() - started


@everywhere
@widths
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_raises_on_one_rank_only_is_an_error_on_every_rank(
    way: str, at_step: int, width: int, backend: str
) -> None:
    for rank, (message, seconds) in enumerate(run_ranks(3, raise_on_one, width, way, at_step, backend=backend)):
        assert message.startswith(f"rank {rank}: step {at_step}") and "backward of some ranks raised midway" in message
        assert seconds < 20


def keep_the_exception(rank: int, world: int, width: int) -> None:
    """A hook raises amid backward, below functions of ours; the user goes on while holding the exception, and so them."""
    model, plain, wrapped = made(width, "copies")
    raises = {"at": -1}

    def hook(state: object, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == raises["at"]:
            raise BrokenLayer("on purpose")
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    kept = []
    for step in range(5):
        if step in (2, 3):
            raises["at"] = step - 2
            wrapped.zero_grad()
            try:
                loss_of(wrapped, 50, rank, width).backward()
            except BrokenLayer as error:
                kept.append(error)
            raises["at"] = -1
            assert wrapped.reducer.has_failed, "known before the exception is gone"
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
        assert_mean(model, mean_by_hand(plain, world, lambda m, r, step=step: loss_of(m, step, r, width)))
    assert len(kept) == 2


@everywhere
@widths
def test_whoever_keeps_the_exception_of_a_backward_may_go_on(width: int, backend: str) -> None:
    run_ranks(2, keep_the_exception, width, backend=backend)


# -- with ZeRO -------------------------------------------------------------------------------------


def overlapped(wrapped: Any, **options: Any) -> Any:
    return phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True, **options)


def raise_before_steps(rank: int, world: int, width: int, options: dict[str, Any], to_none: bool) -> None:
    model, plain, wrapped = made(width, "copies")
    zero, by_hand = overlapped(wrapped, step_in_backward=False, **options), optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        if step in (0, 2, 3):
            zero.zero_grad(set_to_none=to_none)
            break_once(wrapped, rank, width, 1 + 2 * rank)
        zero.zero_grad(set_to_none=to_none)
        loss_of(wrapped, step, rank, width).backward()
        zero.step()
        means = mean_by_hand(plain, world, lambda m, r, step=step: loss_of(m, step, r, width))
        for param, mean in zip(plain.parameters(), means, strict=True):
            param.grad = None if mean is None else mean.float()
        by_hand.step()
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, want)
            assert alike(param)


@everywhere
@widths
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zeros"])
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"partition": "parameter"}], ids=str)
def test_a_backward_that_raises_on_all_ranks_before_any_update_can_be_followed_by_another(
    options: dict[str, Any], to_none: bool, width: int, backend: str
) -> None:
    run_ranks(2, raise_before_steps, width, options, to_none, backend=backend)


def raise_amid_updates(rank: int, world: int, width: int, options: dict[str, Any]) -> list[str]:
    _, _, wrapped = made(width, "copies")
    zero = overlapped(wrapped, **options)
    for step in range(2):
        zero.zero_grad()
        loss_of(wrapped, step, rank, width).backward()
    zero.zero_grad()
    break_once(wrapped, rank, width, 0)
    said = []
    for _ in range(2):
        zero.zero_grad()
        with pytest.raises(phalanx.PhalanxError) as raised:
            loss_of(wrapped, 2, rank, width).backward()
        said.append(str(raised.value))
    # Torch keeps the nodes of a backward that a hook has ended until the next one; with them the model and its memory.
    torch.ones(1, requires_grad=True).sum().backward()
    return said


@everywhere
@widths
@pytest.mark.parametrize("options", [{}, {"stage": 2}], ids=str)
def test_parameters_that_are_between_two_steps_are_refused_for_good(
    options: dict[str, Any], width: int, backend: str
) -> None:
    for said in run_ranks(2, raise_amid_updates, width, options, backend=backend):
        assert all("between two steps" in message and "Load a checkpoint" in message for message in said)


COMPRESSING: dict[str, Any] = {
    "top-k": (lambda: TopKState(None, ratio=0.1), topk_hook),
    "int8": (Int8State, int8_hook),
    "powersgd": (lambda: PowerSGDState(None, start_powerSGD_iter=0), powerSGD_hook),
}


def compressed(rank: int, world: int, width: int, hook: str, lose: str | None) -> None:
    """Training with a pass that is lost in between, and the same without it, bit for bit; `lose`: in which way."""
    trained = []
    for loses in (False, True):
        model = Deep(width)
        cap_mb = (width + 1) * width * 4 / 2**20
        wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=cap_mb, on_nonfinite=lose if lose == "skip" else None)
        make, function = COMPRESSING[hook]
        state = make()
        wrapped.register_comm_hook(state, function)
        optimizer = optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(6):
            if loses and step == 3:
                before = state.state_dict()
                _lose(wrapped, rank, width, lose)
                # What is saved now, before the next forward brings the ranks together, is what the last step left.
                if hook != "powersgd":
                    torch.testing.assert_close(state.state_dict()["residuals"], before["residuals"], rtol=0, atol=0)
            optimizer.zero_grad()
            loss_of(wrapped, step, rank, width).backward()
            optimizer.step()
        trained.append([*(param.detach().clone() for param in model.parameters()), torch.tensor(state.iter)])
    for without, with_loss in zip(*trained, strict=True):
        assert torch.equal(without, with_loss), "the gradients of a pass that nobody used came back later"


def _lose(wrapped: Any, rank: int, width: int, lose: str | None) -> None:
    if lose == "raise":
        break_once(wrapped, rank, width, breaks_at=1 + rank)
        return
    with pytest.warns(UserWarning, match="dropped on every rank"):
        (loss_of(wrapped, 50, rank, width) * (float("inf") if rank == 1 else 1.0)).backward()


@everywhere
@widths
@pytest.mark.parametrize("lose", ["raise", "skip"])
@pytest.mark.parametrize("hook", COMPRESSING)
def test_residuals_of_a_hook_know_nothing_of_a_pass_that_was_thrown_away(
    hook: str, lose: str, width: int, backend: str
) -> None:
    run_ranks(2, compressed, width, hook, lose, backend=backend)


def ask_alone(rank: int, world: int) -> list[int]:
    """Rank 1 raises alone; both hear of it and go on. How many agreements each has taken part in by the end of each step."""
    wrapped = phalanx.DistributedDataParallel(Deep(SMALL), bucket_cap_mb=0.001)
    state = TorchPowerSGDState(None, start_powerSGD_iter=1000)
    wrapped.register_comm_hook(state, torch_powerSGD_hook)
    loss_of(wrapped, 0, rank, SMALL).backward()
    wrapped.module.breaks_at = 1 if rank == 1 else None
    with pytest.raises((BrokenLayer, phalanx.errors.ReductionError)):
        loss_of(wrapped, 1, rank, SMALL).backward()
    wrapped.module.breaks_at = None
    with contextlib.suppress(phalanx.errors.ReductionError):
        wrapped(inputs(2, rank, SMALL))
    wrapped.reducer.collectives.board.retract_failure()
    agreed = []
    for step in range(2, 5):
        wrapped.zero_grad()
        loss_of(wrapped, step, rank, SMALL).backward()
        agreed.append(wrapped.reducer.collectives.board.agreed)
    return agreed


def test_a_rank_that_gave_up_a_pass_by_a_hook_does_not_ask_for_an_agreement_alone() -> None:
    first, second = run_ranks(2, ask_alone, backend="gloo")
    assert first == second
