"""More ways in which a rank may differ: frozen parameters, hooks changed in the midst of training, other optimizers stepped.

As in `rows`: rank 1 is the odd one, and every row must raise on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import phalanx
from phalanx.comm import hooks
from tests.mismatch.around import loader
from tests.mismatch.rows import Odd, Row, backward, changed, hook, load_a_state, model, plain, set_option, wrap, zero

# -- the model -----------------------------------------------------------------------------------


def frozen(**odd: torch.Tensor) -> Row:
    """What is not trained is in no bucket, and is replicated all the same."""

    def row(world: Odd) -> None:
        net = model()
        for name, value in world.pick({"more": torch.ones(4)}, odd).items():
            net.register_parameter(name, nn.Parameter(value, requires_grad=False))
        phalanx.DistributedDataParallel(net)

    return row


def delayed(world: Odd) -> None:
    net = model()
    number = world.pick(0, 1)
    named = [(f"{number}.weight", net[number].weight)]  # type: ignore[index]
    trigger = net[2].weight  # type: ignore[index]
    phalanx.DistributedDataParallel(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)


def delayed_until(world: Odd) -> None:
    net = model()
    named = [("0.weight", net[0].weight)]  # type: ignore[index]
    trigger = net[world.pick(1, 2)].weight  # type: ignore[index]
    phalanx.DistributedDataParallel(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)


def version_of_torch(world: Odd) -> None:
    before, torch.__version__ = torch.__version__, world.pick(torch.__version__, "2.9.0")  # type: ignore[assignment]
    try:
        wrap()
    finally:
        torch.__version__ = before


def divisor(world: Odd) -> None:
    wrapped = wrap()
    world.settled(wrapped)
    with Join([wrapped], divide_by_initial_world_size=world.pick(True, False)):
        backward(wrapped)


# -- hooks, later --------------------------------------------------------------------------------


def set_later(made: Callable[[], Any], chosen: Any, change: Callable[[Any], None]) -> Row:
    """After three steps the odd rank alone changes the state of its hook, which decides what it sends."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        state = made()
        wrapped.register_comm_hook(state, chosen)
        for _ in range(3):
            backward(wrapped)
        world.settled(wrapped)
        if world.odd:
            change(state)
        backward(wrapped)

    return row


def _powersgd() -> Any:
    return hooks.PowerSGDState(None, start_powerSGD_iter=2)


def of_torch(rank: int) -> Callable[[], tuple[Any, Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as module

    return lambda: (module.PowerSGDState(None, rank, start_powerSGD_iter=2), module.powerSGD_hook)


def hidden(world: Odd) -> None:
    """Nobody knows what a user's own hook is set to; it is found out in the midst of it, on a future of which much hangs."""
    wrapped = wrap()
    state = hooks.PowerSGDState(None, world.pick(1, 2), start_powerSGD_iter=2)
    wrapped.register_comm_hook(None, lambda _, bucket: hooks.powerSGD_hook(state, bucket))
    world.settled(wrapped)
    for _ in range(4):
        backward(wrapped)


def sends_otherwise(
    usual: Callable[[torch.Tensor], torch.Tensor], odd: Callable[[torch.Tensor], torch.Tensor], hides: bool = False
) -> Row:
    """A user's own hook, by torch's own collectives, that casts or cuts on one rank; from the third step on.

    One that `hides` does not ask its future for the value, and with it not for the error.
    """

    def row(world: Odd) -> None:
        wrapped = wrap()
        begins = False

        def sent(state: Any, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
            made = (world.pick(usual, odd) if begins else usual)(bucket.buffer())
            work = dist.all_reduce(made, async_op=True)
            future: torch.futures.Future[torch.Tensor] = work.get_future().then(
                lambda done: (hides or done.value()) and bucket.buffer()
            )
            return future

        wrapped.register_comm_hook(None, sent)
        for _ in range(2):
            backward(wrapped)
        world.settled(wrapped)
        begins = True
        backward(wrapped)

    return row


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: setattr(state, name, value)


def load_the_beginning(state: Any) -> None:
    state.load_state_dict(_powersgd().state_dict())


# -- several optimizers --------------------------------------------------------------------------


def stepped_in_place_of(world: Odd) -> None:
    """Two models of one shape: the odd rank steps the optimizer of the other one. Nobody can tell the gathers apart."""
    first, second = wrap(), wrap()
    optimizers = [zero(one.parameters()) for one in (first, second)]
    for wrapped, optimizer in zip((first, second), optimizers, strict=True):
        backward(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    backward(first)
    optimizers[world.pick(0, 1)].step()
    world.settled(nn.ModuleList([first.module, second.module]))
    backward(second)


def stepped_in_another_order(world: Odd) -> None:
    first, second = wrap(), wrap()
    optimizers = [zero(one.parameters()) for one in (first, second)]
    backward(first)
    backward(second)
    world.settled(nn.ModuleList([first.module, second.module]))
    for optimizer in world.pick(optimizers, optimizers[::-1]):
        optimizer.step()


def optimizers_made_in_another_order(world: Odd) -> None:
    """Of two models of one shape, whose parameters have the same names."""
    wrapped = [wrap(), wrap()]
    for one in world.pick(wrapped, wrapped[::-1]):
        zero(one.parameters())


def promised_static(world: Odd) -> None:
    """Not by the argument, which is compared when the model is wrapped."""
    wrapped = wrap()
    world.settled(wrapped)
    if world.odd:
        wrapped._set_static_graph()
    backward(wrapped)


_WRAPPERS = "wrapper is number 1 of this group on rank 0, 2, number 2 of this group on rank 1"
_STAGE_2 = {"stage": 2, "overlap_with_ddp": True}

# A rank asks for an agreement to which nobody comes: on gloo a collective stays under way until its time limit.
PASSED_BY = {"iter of PowerSGD, later", "rank of PowerSGD, later", "PowerSGD loaded", "ratio, later", "blocks, later"}
PASSED_BY |= {
    "in a user's own hook",
    "dtype of a user's own hook",
    "size of a user's own hook",
    "another optimizer stepped",
    "a user's own hook that hides it",
}

ROWS: dict[str, tuple[Row, str]] = {
    "frozen size": (frozen(more=torch.ones(5)), "'more' is [4] float32 on rank 0, 2, [5] float32 on rank 1"),
    "frozen dtype": (frozen(more=torch.ones(4).double()), "[4] float64 on rank 1"),
    "one frozen more": (frozen(more=torch.ones(4), other=torch.ones(4)), "frozen parameter 'other' is missing on rank 0, 2"),
    "delayed": (delayed, "stride [8, 1], delayed)"),
    "delayed until": (delayed_until, "param_to_hook_all_reduce is '1.weight' on rank 0, 2, '2.weight' on rank 1"),
    "version of torch": (version_of_torch, "2.9.0 on rank 1"),
    "divisor of torch's Join": (divisor, "divide_by_initial_world_size is True on rank 0, 2, False on rank 1"),
    "static graph, set later": (promised_static, "static_graph is missing on rank 0, 2, set by"),
    "sampler": (loader({"_shuffle": True}), "sampler RandomSampler"),
    "inside a wrapped hook": (
        hook(plain(hooks.fp16_compress_wrapper(hooks.allreduce_hook)), plain(hooks.fp16_compress_wrapper(hooks.noop_hook))),
        "float16",
    ),
    "rank of torch's PowerSGD": (hook(of_torch(1), of_torch(2)), "matrix_approximation_rank of the hook's state is 1"),
    "in a user's own hook": (hidden, "in the same order"),
    "dtype of a user's own hook": (sends_otherwise(torch.clone, torch.Tensor.half), "float16"),
    "size of a user's own hook": (sends_otherwise(torch.clone, lambda flat: flat[:5].clone()), "5 x float32"),
    "a user's own hook that hides it": (sends_otherwise(torch.clone, lambda flat: flat[:5].clone(), True), "5 x float32"),
    "iter of PowerSGD, later": (set_later(_powersgd, hooks.powerSGD_hook, setting("iter", 0)), "iter of the hook's state"),
    "rank of PowerSGD, later": (
        set_later(_powersgd, hooks.powerSGD_hook, setting("matrix_approximation_rank", 2)),
        "matrix_approximation_rank of the hook's state",
    ),
    "PowerSGD loaded": (set_later(_powersgd, hooks.powerSGD_hook, load_the_beginning), "iter of the hook's state"),
    "ratio, later": (set_later(hooks.TopKState, hooks.topk_hook, setting("ratio", 0.5)), "ratio of the hook's state"),
    "blocks, later": (set_later(hooks.Int8State, hooks.int8_hook, setting("block_size", 64)), "block_size of the hook's"),
    "another optimizer stepped": (stepped_in_place_of, "without a backward that was reduced since the last step()"),
    "optimizers in another order": (stepped_in_another_order, _WRAPPERS),
    "optimizers made in another order": (optimizers_made_in_another_order, _WRAPPERS),
    # These raise in the midst of backward, which leaves a part of the graph with autograd.
    "lr changed, stage 2": (changed(set_option("lr", 0.01), **_STAGE_2), "lr of group 0"),
    "state loaded, stage 2": (changed(load_a_state, step_in_backward=False, **_STAGE_2), "loaded states"),
}
