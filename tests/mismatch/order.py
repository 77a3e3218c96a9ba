"""The same things done in another order, or not equally often, on one rank: every collective of them is known to all.

As in `rows`: rank 1 is the odd one, and every row must raise on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from tests.mismatch.rows import Odd, Row, backward, wrap, zero


def sizes_in_another_order(world: Odd) -> None:
    """Two models of other sizes: gathers that do not fit together, each of which is known to every rank."""
    first, second = wrap(), phalanx.DistributedDataParallel(nn.Linear(8, 300))
    optimizers = [zero(one.parameters()) for one in (first, second)]

    def train(order: list[Any]) -> None:
        backward(first)
        backward(second)
        for optimizer in order:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        train(optimizers)
    world.settled(nn.ModuleList([first.module, second.module]))
    train(world.pick(optimizers, optimizers[::-1]))


def wrappers_in_another_order(world: Odd) -> None:
    """Two models of other sizes, whose backwards come the other way round on one rank."""
    pair = [wrap(), phalanx.DistributedDataParallel(nn.Linear(8, 300))]
    for _ in range(4):
        for one in pair:
            backward(one)
    world.settled(nn.ModuleList([one.module for one in pair]))
    for one in world.pick(pair, pair[::-1]):
        backward(one)


def _exchange(world: Odd) -> Exchange:
    return Exchange(world.rank, world.num_ranks, torch.device("cpu"))


def unsynchronised(world: Odd) -> None:
    """One backward of the odd rank is not reduced, so that it comes to the end of the epoch when the others do not."""
    wrapped = wrap()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    world.settled(nn.Module())
    for step in range(6):
        with wrapped.no_sync() if world.odd and step == 3 else contextlib.nullcontext():
            backward(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    _exchange(world).barrier()


def unsynchronised_and_sharded(world: Odd) -> None:
    """A sharded step by gradients that are this rank's own: found out before it is made."""
    wrapped = wrap()
    optimizer = zero(wrapped.parameters())
    for step in range(3):
        world.settled(wrapped)
        with wrapped.no_sync() if world.odd and step == 2 else contextlib.nullcontext():
            backward(wrapped)
        optimizer.step()
        optimizer.zero_grad()


def never_synchronised(world: Odd) -> None:
    wrapped = wrap()
    world.settled(wrapped)
    with wrapped.no_sync() if world.odd else contextlib.nullcontext():
        backward(wrapped)
    _exchange(world).barrier()


def loaders_in_another_order(world: Odd) -> None:
    """Training and evaluation the other way round."""
    wrapped, exchange = wrap(), _exchange(world)
    data = DataLoader(TensorDataset(torch.ones(24, 8)), batch_size=2)
    training, evaluation = (Loader(data, exchange, exchange.device, one) for one in (wrapped, None))
    world.settled(wrapped)
    for loader in world.pick([training, evaluation], [evaluation, training]):
        for (inputs,) in loader:
            if loader is training:
                wrapped(inputs).sum().backward()
            else:
                exchange.mean(inputs.sum())


def once_more(what: str) -> Row:
    """The odd rank does something once more than the others, or once less."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = zero(wrapped.parameters())
        for _ in range(3):
            backward(wrapped)
            optimizer.step()
        world.settled(wrapped)
        for _ in range(world.pick(1, 2 if what == "backward" else 1)):
            backward(wrapped)
        for number in range(world.pick(1, {"step": 2, "no step": 0}.get(what, 1))):
            if number:
                world.settled(wrapped)
            optimizer.step()
        if what == "step" and not world.odd:
            world.settled(wrapped)
        backward(wrapped)
        _exchange(world).barrier()

    return row


def plainly(num_backwards: int, num_steps: int) -> Row:
    """The odd rank makes so many backwards and steps of a plain optimizer, of which the others make one each."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(3):
            backward(wrapped)
            optimizer.step()
        for _ in range(world.pick(1, num_backwards)):
            backward(wrapped)
        for _ in range(world.pick(1, num_steps)):
            optimizer.step()
        world.settled(wrapped)
        backward(wrapped)
        _exchange(world).barrier()

    return row


def set_lr(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.7


def load_lr(optimizer: torch.optim.Optimizer) -> None:
    """A whole state, of which nothing but the rate is another."""
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)


def plain_options(change: Callable[[Any], None], late: bool) -> Row:
    """The odd rank changes options of a plain optimizer, after some steps or, with `late` not, before the first."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if world.odd and not late:
            change(optimizer)
        for _ in range(3):
            backward(wrapped)
            optimizer.step()
            schedule.step()
        world.settled(wrapped)
        if world.odd and late:
            change(optimizer)
        backward(wrapped)
        optimizer.step()
        _exchange(world).barrier()

    return row


def plain_subset(world: Odd) -> None:
    """The odd rank's plain optimizer lacks a parameter, which the others step."""
    wrapped = wrap()
    params = dict(wrapped.module.named_parameters())
    optimizer = torch.optim.SGD([p for n, p in params.items() if not (world.odd and n == "0.bias")], lr=0.1)
    for _ in range(3):
        backward(wrapped)
        optimizer.step()
    world.settled(wrapped)
    backward(wrapped)
    _exchange(world).barrier()


def plain_groups(world: Odd) -> None:
    """The odd rank's second group begins earlier. Nothing comes of it until that group has another rate, on all ranks."""
    wrapped = wrap()
    params = list(wrapped.parameters())
    first = world.pick(4, 2)
    optimizer = torch.optim.SGD([{"params": params[:first]}, {"params": params[first:]}], lr=0.1)
    for step in range(4):
        if step == 3:
            optimizer.param_groups[1]["lr"] = 0.01
        backward(wrapped)
        optimizer.step()
    world.settled(wrapped)
    backward(wrapped)
    _exchange(world).barrier()


def forward_once_more(world: Odd) -> None:
    """Without a backward: only its buffers are synchronised."""
    wrapped = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    for _ in range(3):
        backward(wrapped)
    world.settled(wrapped)
    if world.odd:
        wrapped(torch.ones(2, 8))
    backward(wrapped)
    _exchange(world).barrier()


def buffer_added_later(world: Odd) -> None:
    """Found out by the odd rank alone, which the others wait for."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net.register_buffer("common", torch.zeros(3))
    wrapped = phalanx.DistributedDataParallel(net)
    for _ in range(3):
        backward(wrapped)
    world.settled(wrapped)
    if world.odd:
        net.register_buffer("more", torch.zeros(5))
    backward(wrapped)


# On gloo a collective stays under way until its time limit.
PASSED_BY = {"wrappers of other sizes", "no_sync once, sharded", "backward once more"}
PASSED_BY |= {"step once more", "step left out", "forward once more", "buffer added later"}

_STEPS = "number of optimizer steps since the last averaged backward is 1 on rank 0, 2, "

ROWS: dict[str, tuple[Row, str]] = {
    "optimizers of other sizes": (sizes_in_another_order, "parameter 0 is '0.weight' on rank 0, 2, 'weight' on rank 1"),
    "wrappers of other sizes": (wrappers_in_another_order, "all_reduce of"),
    "no_sync once": (unsynchronised, _STEPS + "2 on rank 1"),
    "no_sync once, sharded": (unsynchronised_and_sharded, "without a backward that was reduced"),
    "no_sync at the first": (never_synchronised, ""),
    "order of loaders": (loaders_in_another_order, ""),
    "backward once more": (once_more("backward"), "agreeing on the settings of ZeroRedundancyOptimizer"),
    "step once more": (once_more("step"), "without a backward that was reduced since the last step()"),
    "step left out": (once_more("no step"), "agreeing on the settings of ZeroRedundancyOptimizer"),
    "a plain step more": (plainly(1, 2), _STEPS + "2 on rank 1"),
    "a plain step less": (plainly(1, 0), _STEPS + "0 on rank 1"),
    "a plain rate later": (plain_options(set_lr, late=True), "lr of group 0 is 0.0125 on rank 0, 2, 0.7 on rank 1"),
    "a plain rate loaded": (plain_options(load_lr, late=True), "lr of group 0 is 0.0125 on rank 0, 2, 0.7 on rank 1"),
    "a plain rate at once": (
        plain_options(set_lr, late=False),
        "lr of group 0 in the last step, which has been applied is 0.1 on rank 0, 2, 0.7 on rank 1",
    ),
    "a plain optimizer of some": (plain_subset, "parameters that it has not is none on rank 0, 2, 0.bias on rank 1"),
    "a plain optimizer's groups": (plain_groups, "parameters of group 0 is 0.weight, 0.bias, 1.weight, 1.bias"),
    "a backward more before a plain step": (plainly(2, 1), _STEPS + "0 on rank 1"),
    "forward once more": (forward_once_more, "broadcast of 128 x uint8"),
    "buffer added later": (buffer_added_later, "this rank has 2 tensors of 32 bytes together, rank 0 has 1 of 12"),
}
