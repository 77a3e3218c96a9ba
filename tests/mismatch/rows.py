"""One function per way in which a rank may differ from the others. Each is run on all ranks, and must raise on all.

Rank 1 is the odd one. A row that trains first calls `world.settled`: from then on no parameter may change any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.comm import hooks

Row = Callable[["Odd"], None]


class Odd:
    """One rank of a row. `odd`: whether it is the one that differs; `folder`: one that all ranks see."""

    def __init__(self, rank: int, num_ranks: int = 3, folder: Path | None = None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.folder = folder
        self.odd = rank == 1
        self.watched: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []

    def pick(self, usual: Any, odd: Any) -> Any:
        return odd if self.odd else usual

    def settled(self, model: nn.Module) -> None:
        """All is well so far: the next thing that happens is the row's own, and nothing may be applied."""
        self.watched = [parameter.data for parameter in model.parameters()]
        self.before = [value.clone() for value in self.watched]

    @property
    def unchanged(self) -> bool:
        return all(map(torch.equal, self.watched, self.before))


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width))


def backward(wrapped: nn.Module, width: int = 8) -> None:
    wrapped(torch.ones(2, width)).square().mean().backward()


def wrap(**options: Any) -> phalanx.DistributedDataParallel:
    return phalanx.DistributedDataParallel(model(), bucket_cap_mb=options.pop("bucket_cap_mb", 0.0003), **options)


def zero(params: Any, optimizer_class: Any = torch.optim.Adam, **options: Any) -> phalanx.ZeroRedundancyOptimizer:
    options.setdefault("lr", 0.1)
    return phalanx.ZeroRedundancyOptimizer(params, optimizer_class, **options)


# -- the wrapper's arguments ---------------------------------------------------------------------


def argument(name: str, usual: Any, odd: Any) -> Row:
    def row(world: Odd) -> None:
        wrap(**{name: world.pick(usual, odd)})

    return row


def ignored(world: Odd) -> None:
    net = model()
    net._ddp_params_and_buffers_to_ignore = world.pick(["0.weight"], ["1.weight"])  # type: ignore[assignment]
    phalanx.DistributedDataParallel(net)


def buffers(name: str, num: int) -> Row:
    """The odd rank's model has another buffer, or one of another size."""

    def row(world: Odd) -> None:
        net = model()
        net.register_buffer("common", torch.zeros(3))
        if world.odd:
            net.register_buffer(name, torch.zeros(num))
        phalanx.DistributedDataParallel(net)

    return row


def only_some_wrap(world: Odd) -> None:
    """The odd rank goes on to train with a bare collective in place of the wrapper."""
    if world.odd:
        zero(list(model().parameters()))
    else:
        wrap()


# -- hooks ---------------------------------------------------------------------------------------


def hook(usual: Any, odd: Any, after: int = 0) -> Row:
    """`usual` and `odd` make (state, hook), or None for no hook; registered after some steps."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        for _ in range(after):
            backward(wrapped)
        world.settled(wrapped)
        chosen = world.pick(usual, odd)()
        if chosen is not None:
            wrapped.register_comm_hook(*chosen)
        backward(wrapped)

    return row


def no_hook() -> None:
    return None


def plain(chosen: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (None, chosen)


def powersgd(rank: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: (hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2), hooks.powerSGD_hook)


# -- the optimizer, as it is made ----------------------------------------------------------------


def made(usual: dict[str, Any], odd: dict[str, Any]) -> Row:
    def row(world: Odd) -> None:
        zero(model().parameters(), **world.pick(usual, odd))

    return row


def made_of(usual: Callable[[list[Any]], Any], odd: Callable[[list[Any]], Any]) -> Row:
    """Other parameters or groups, chosen from the model's; a wrapper knows their names."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        zero(world.pick(usual, odd)(list(wrapped.parameters())))

    return row


def order_known_later(world: Odd) -> None:
    """The wrapper, and with it the names, come after the optimizer."""
    net = model()
    params = list(net.parameters())
    with torch.no_grad():
        params[0].add_(world.rank)  # by values alone nobody could tell
    optimizer = zero(world.pick(params, [*params[2:4], *params[:2], *params[4:]]))
    wrapped = phalanx.DistributedDataParallel(net)
    world.settled(wrapped)
    backward(wrapped)
    optimizer.step()


def order_without_names(world: Odd) -> None:
    """No wrapper knows their names, and all shapes are the same."""
    params = list(model().parameters())
    zero(world.pick(params, [*params[2:4], *params[:2], *params[4:]]))


def frozen_when_made(world: Odd) -> None:
    net = model()
    next(net.parameters()).requires_grad_(not world.odd)
    zero(net.parameters())


# -- the optimizer, later ------------------------------------------------------------------------


def changed(change: Callable[[Any], None], when: str = "before backward", **options: Any) -> Row:
    """After two steps the odd rank changes something alone."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = zero(wrapped.parameters(), **options)
        for _ in range(2):
            backward(wrapped)
            optimizer.step()
            optimizer.zero_grad()
        world.settled(wrapped)
        if when == "before backward" and world.odd:
            change(optimizer)
        backward(wrapped)
        if when == "before step" and world.odd:
            change(optimizer)
        optimizer.step()

    return row


def alone(change: Callable[[Any], None]) -> Row:
    """As `changed`, without a wrapper: gradients are set by hand."""

    def row(world: Odd) -> None:
        net = model()
        optimizer = zero(net.parameters())
        for step in range(3):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            if step == 2:
                world.settled(net)
                if world.odd:
                    change(optimizer)
            optimizer.step()

    return row


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[0][name] = value

    return change


def load_a_state(optimizer: Any) -> None:
    params = [torch.nn.Parameter(torch.ones_like(p)) for p in optimizer._all_params]
    other = torch.optim.Adam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    other.step()
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


def clipped(usual: Any, odd: Any, **options: Any) -> Row:
    """Each rank clips by its own arguments; None: not at all."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = zero(wrapped.parameters(), **options)
        for step in range(3):
            backward(wrapped)
            if step == 2:
                world.settled(wrapped)
            chosen = usual if step < 2 else world.pick(usual, odd)
            if chosen is not None:
                optimizer.clip_grad_norm_(*chosen)
            optimizer.step()
            optimizer.zero_grad()

    return row


def added_group(world: Odd) -> None:
    wrapped = wrap()
    optimizer = zero(list(wrapped.parameters())[:4])
    optimizer.add_param_group({"params": list(wrapped.parameters())[4:], "lr": world.pick(0.1, 0.2)})


_OTHER_LR = "lr of group 0 is 0.1 on rank 0, 2, 0.01 on rank 1"

ROWS: dict[str, tuple[Row, str]] = {
    "views": (argument("gradient_as_bucket_view", False, True), "gradient_as_bucket_view"),
    "unused": (argument("find_unused_parameters", False, True), "find_unused_parameters"),
    "static graph": (argument("static_graph", False, True), "static_graph"),
    "on_unused": (argument("on_unused", "warn", "raise"), "on_unused"),
    "dropping unused": (argument("skip_all_reduce_unused_params", False, True), "skip_all_reduce_unused_params"),
    "buffers": (argument("forward_sync_buffers", True, False), "forward_sync_buffers"),
    "caps": (argument("bucket_cap_mb", 1.0, 2.0), "bucket_cap_mb"),
    "precision": (
        argument("mixed_precision", None, phalanx.ddp.features.precision.MixedPrecision(torch.bfloat16)),
        "mixed_precision",
    ),
    "one buffer more": (buffers("another", 3), "buffer 'another' is missing on rank 0, 2, [3] float32 on rank 1"),
    "size of a buffer": (buffers("common", 4), "buffer 'common' is [3] float32 on rank 0, 2, [4] float32 on rank 1"),
    "ignored": (ignored, "ignored parameters"),
    "only some wrap": (only_some_wrap, "DistributedDataParallel"),
    "fp16 and bf16": (hook(plain(hooks.fp16_compress_hook), plain(hooks.bf16_compress_hook)), "bf16_compress_hook"),
    "fp16 and none": (hook(plain(hooks.fp16_compress_hook), no_hook), "fp16_compress_hook on rank 0, 2, missing on rank 1"),
    "none and bf16": (hook(no_hook, plain(hooks.bf16_compress_hook)), "bf16_compress_hook"),
    "plain and fp16": (hook(plain(hooks.allreduce_hook), plain(hooks.fp16_compress_hook)), "allreduce_hook"),
    "rank of PowerSGD": (hook(powersgd(1), powersgd(2)), "matrix_approximation_rank"),
    "a hook later": (hook(no_hook, plain(hooks.fp16_compress_hook), after=3), "reduction of gradients"),
    "class": (made({"optimizer_class": torch.optim.Adam}, {"optimizer_class": torch.optim.SGD}), "optimizer_class"),
    "lr": (made({"lr": 0.1}, {"lr": 0.2}), "lr of group 0 is 0.1 on rank 0, 2, 0.2 on rank 1"),
    "betas": (made({"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}), "betas of group 0"),
    "amsgrad": (made({"amsgrad": False}, {"amsgrad": True}), "amsgrad of group 0"),
    "weight decay": (made({"weight_decay": 0.0}, {"weight_decay": 0.1}), "weight_decay of group 0"),
    "stage": (made({"stage": 1}, {"stage": 2}), "stage"),
    "partition": (made({"partition": "element"}, {"partition": "parameter"}), "partition"),
    "overlap": (made({"overlap_with_ddp": False}, {"overlap_with_ddp": True}), "overlap_with_ddp"),
    "number of groups": (made_of(lambda p: p, lambda p: [{"params": p[:2]}, {"params": p[2:]}]), "group"),
    "sizes of groups": (
        made_of(
            lambda p: [{"params": p[:2]}, {"params": p[2:]}],
            lambda p: [{"params": p[:4]}, {"params": p[4:]}],
        ),
        "size of group 0 is 2 on rank 0, 2, 4 on rank 1",
    ),
    "order": (made_of(lambda p: p, lambda p: [*p[2:4], *p[:2], *p[4:]]), "parameter 0"),
    "order, known later": (order_known_later, "parameter 0"),
    "order, without names": (order_without_names, "parameter 0 has the values of parameter 2 of rank 0"),
    "frozen when made": (frozen_when_made, "frozen"),
    "number of parameters": (made_of(lambda p: p, lambda p: p[:4]), "size of group 0"),
    "lr changed": (changed(set_option("lr", 0.01)), _OTHER_LR),
    "lr changed, overlapped": (changed(set_option("lr", 0.01), overlap_with_ddp=True), "lr of group 0"),
    "lr changed, overlapped, step apart": (
        changed(set_option("lr", 0.01), overlap_with_ddp=True, step_in_backward=False),
        "lr of group 0",
    ),
    "lr changed, whole parameters": (changed(set_option("lr", 0.01), partition="parameter"), "lr of group 0"),
    "betas changed": (changed(set_option("betas", (0.5, 0.9))), "betas of group 0"),
    "lr changed before step": (changed(set_option("lr", 0.01), "before step"), _OTHER_LR),
    "lr changed before step, stage 2": (
        changed(set_option("lr", 0.01), "before step", stage=2, overlap_with_ddp=True, step_in_backward=False),
        _OTHER_LR,
    ),
    "lr changed before step, whole parameters": (
        changed(set_option("lr", 0.01), "before step", partition="parameter"),
        _OTHER_LR,
    ),
    "state loaded": (changed(load_a_state), "loaded states"),
    "state loaded before step": (changed(load_a_state, "before step"), "loaded states"),
    "lr changed, no wrapper": (alone(set_option("lr", 0.01)), _OTHER_LR),
    "state loaded, no wrapper": (alone(load_a_state), "loaded states"),
    "limit of the norm": (clipped((1e-3,), (1e-4,)), "limits of clip_grad_norm_"),
    "kind of norm": (clipped((1e-3, 2.0), (1e-3, 1.0)), "limits of clip_grad_norm_"),
    "not clipped": (clipped((1e-3,), None), "clip_grad_norm_"),
    "limit of the norm, overlapped": (
        clipped((1e-3,), (1e-4,), overlap_with_ddp=True, step_in_backward=False),
        "max_norm",
    ),
    "group added": (added_group, "lr of group 1"),
}
