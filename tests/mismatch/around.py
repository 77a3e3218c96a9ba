"""More ways in which a rank may differ: what steps in backward, uneven inputs, loaders, checkpoints, and plain optimizers.

As in `rows`: rank 1 is the odd one, and every row must raise on all ranks. What the wrapper cannot see, an optimizer that
the user steps by hand, is found by `check_drift_every`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import phalanx
from phalanx.comm import hooks
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from phalanx.optim import apply_in_backward
from tests.mismatch.rows import Odd, Row, argument, backward, hook, made_of, model, wrap, zero

# -- what steps in backward ----------------------------------------------------------------------


def in_backward(usual: dict[str, Any] | None, odd: dict[str, Any] | None) -> Row:
    """`apply_in_backward` with other arguments; None: not at all. "params": how many of the parameters."""

    def row(world: Odd) -> None:
        net = model()
        chosen = world.pick(usual, odd)
        if chosen is not None:
            options = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "params": 6, **chosen}
            apply_in_backward(params=list(net.parameters())[: options.pop("params")], **options)
        wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.0003)
        world.settled(wrapped)
        backward(wrapped)

    return row


def in_backward_later(change: Callable[[Any, nn.Module], None], begins: bool) -> Row:
    """After two steps the odd rank changes something alone; `begins`: it is the one who begins to step in backward."""

    def row(world: Odd) -> None:
        net = model()
        stepped = None if begins else apply_in_backward(torch.optim.SGD, net.parameters(), lr=0.1)
        wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.0003)
        for _ in range(2):
            backward(wrapped)
        world.settled(wrapped)
        if world.odd:
            change(stepped, net)
        backward(wrapped)

    return row


def slower(stepped: Any, net: nn.Module) -> None:
    for group in stepped.param_groups:
        group["lr"] = 0.01


def begin(stepped: Any, net: nn.Module) -> None:
    apply_in_backward(torch.optim.SGD, net.parameters(), lr=0.1)


def torchs_in_backward(world: Odd) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = model()
    if world.odd:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrapped = phalanx.DistributedDataParallel(net)
    world.settled(wrapped)
    backward(wrapped)


# -- the state, uneven inputs, the model ---------------------------------------------------------


def consolidated(world: Odd) -> None:
    net = model()
    optimizer = zero(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.consolidate_state_dict(to=world.pick(0, 2))


def joined(**odd: Any) -> Row:
    def row(world: Odd) -> None:
        wrapped = wrap()
        world.settled(wrapped)
        with wrapped.join(**world.pick({}, odd)):
            backward(wrapped)

    return row


def default_dtype(world: Odd) -> None:
    torch.set_default_dtype(world.pick(torch.float32, torch.float64))
    try:
        wrap()
    finally:
        torch.set_default_dtype(torch.float32)


def version(world: Odd) -> None:
    before, phalanx.__version__ = phalanx.__version__, world.pick(phalanx.__version__, "0.0.9")
    try:
        wrap()
    finally:
        phalanx.__version__ = before


def wrapped_otherwise(world: Odd) -> None:
    """Two wrappers of the same shape, made in another order."""
    first, second = model(), model()
    pair = [phalanx.DistributedDataParallel(net) for net in world.pick((first, second), (second, first))]
    world.settled(nn.ModuleList([first, second]))
    for wrapped in world.pick(pair, pair[::-1]):
        backward(wrapped)


def assigned(world: Odd) -> None:
    """The odd rank alone makes other tensors its parameters, which makes it begin anew with the first plan."""
    wrapped = wrap()
    for _ in range(3):
        backward(wrapped)
    world.settled(wrapped)
    if world.odd:
        state = {name: value.clone() for name, value in wrapped.module.state_dict().items()}
        wrapped.load_state_dict(state, assign=True)
    backward(wrapped)


# -- loaders -------------------------------------------------------------------------------------


def _loader(world: Odd, given: DataLoader[Any], **options: Any) -> Loader:
    exchange = Exchange(world.rank, world.num_ranks, torch.device("cpu"))
    return Loader(given, exchange, torch.device("cpu"), **options)


def _data() -> TensorDataset:
    return TensorDataset(torch.arange(24.0))


def loader(odd: dict[str, Any]) -> Row:
    """An option of `Worker.loader`, or with "_" before it of the DataLoader."""

    def row(world: Odd) -> None:
        chosen = {**world.pick({}, odd)}
        given = {name[1:]: chosen.pop(name) for name in list(chosen) if name.startswith("_")}
        if "batch_sampler" not in given:
            given.setdefault("batch_size", 2)
        wrapped = wrap()
        with_model = {} if chosen.pop("without", False) else {"model": wrapped}
        _loader(world, DataLoader(_data(), **given), **with_model, **chosen)

    return row


def loader_moved(change: Callable[[Loader], None]) -> Row:
    def row(world: Odd) -> None:
        made = _loader(world, DataLoader(_data(), 2, shuffle=True))
        next(iter(made))
        if world.odd:
            change(made)
        next(iter(made))

    return row


def averaged(world: Odd) -> None:
    """As many numbers everywhere, which are not called the same."""
    exchange = Exchange(world.rank, world.num_ranks, torch.device("cpu"))
    exchange.mean({"loss": 1.0, world.pick("accuracy", "error"): torch.ones(2)})


def skip_ahead(made: Loader) -> None:
    made.load_state_dict({**made.state_dict(), "epoch": 1, "position": 6, "order": ""})


# -- checkpoints ---------------------------------------------------------------------------------


def saved(usual: Callable[[Odd, Any], None], odd: Callable[[Odd, Any], None], **made: Any) -> Row:
    """A checkpoint of step 1 is there; then each rank does its own. `made` are arguments of the odd rank's Checkpointer."""

    def row(world: Odd) -> None:
        wrapped = wrap()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        world.settled(wrapped)
        options = {"folder": str(world.folder), "optimizer": optimizer, **world.pick({}, _lively(made, world, optimizer))}
        with phalanx.Checkpointer(model=wrapped, timeout_s=10, patience_s=10, **options) as checkpointer:
            if not made:
                checkpointer.save(1)
                checkpointer.wait()
            world.pick(usual, odd)(world, checkpointer)

    return row


def _lively(made: dict[str, Any], world: Odd, optimizer: Any) -> dict[str, Any]:
    found = dict(made)
    if "folder" in made:
        found["folder"] = f"{world.folder}-{made['folder']}"
    if "scheduler" in made:
        found["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return found


def saves(step: int) -> Callable[[Odd, Any], None]:
    return lambda world, checkpointer: checkpointer.save(step)


def restores(**options: Any) -> Callable[[Odd, Any], None]:
    return lambda world, checkpointer: checkpointer.restore(**options)


# -- optimizers that the wrapper does not know ---------------------------------------------------


def drifts(step: Callable[[Odd, Any, nn.Module], None], **options: Any) -> Row:
    """Each rank steps a plain optimizer by itself, the odd one otherwise; parameters are compared after each backward."""

    def row(world: Odd) -> None:
        wrapped = wrap(check_drift_every=1)
        optimizer = torch.optim.SGD(wrapped.parameters(), **{"lr": 0.1, **world.pick({}, options)})
        for _ in range(3):
            optimizer.zero_grad()
            backward(wrapped)
            step(world, optimizer, wrapped)

    return row


def plain_step(world: Odd, optimizer: Any, wrapped: nn.Module) -> None:
    optimizer.step()


def clips_alone(world: Odd, optimizer: Any, wrapped: nn.Module) -> None:
    if world.odd:
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-6)
    optimizer.step()


def steps_twice(world: Odd, optimizer: Any, wrapped: nn.Module) -> None:
    for _ in range(world.pick(1, 2)):
        optimizer.step()


def state(made: Callable[..., Any], chosen: Any, **options: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (made(None, **options), chosen)


MixedPrecision = phalanx.ddp.features.precision.MixedPrecision

# Found when a step has been made, which is what they are about.
APPLIED = {"plain lr", "plain momentum", "plain clipping", "plain steps", "plain decay"}
# A rank asks for an agreement, or a collective, to which nobody comes: on gloo it stays under way until its time limit.
PASSED_BY = {"begins to step in backward", "assigned", "wrapped otherwise"}
# Say all through the store or by objects: the transport makes no difference.
BY_STORE = ("loader", "checkpoint")

ROWS: dict[str, tuple[Row, str]] = {
    "in backward here": (in_backward(None, {}), "optimizer in backward of '0.weight' is missing on rank 0, 2, SGD("),
    "in backward there": (in_backward({}, None), "missing on rank 1"),
    "class in backward": (in_backward({}, {"optimizer_class": torch.optim.Adam}), "Adam("),
    "lr in backward": (in_backward({}, {"lr": 0.2}), "lr=0.2"),
    "decay in backward": (in_backward({}, {"weight_decay": 0.1}), "weight_decay=0.1"),
    "limit in backward": (in_backward({}, {"max_norm": 1.0}), "max_norm=1.0"),
    "parameters in backward": (in_backward({}, {"params": 4}), "'2.weight'"),
    "lr in backward, later": (in_backward_later(slower, False), "lr in backward of '0.weight' is 0.1 on rank 0, 2, 0.01"),
    "begins to step in backward": (in_backward_later(begin, True), "reduction of gradients"),
    "torch's own in backward": (torchs_in_backward, "optimizer in backward of '0.weight' is missing on rank 0, 2"),
    "consolidated to": (consolidated, "to is 0 on rank 0, 2, 2 on rank 1"),
    "join enabled": (joined(enable=False), "enable is True on rank 0, 2, False on rank 1"),
    "join's divisor": (joined(divide_by_initial_world_size=False), "divide_by_initial_world_size"),
    "join's early end": (joined(throw_on_early_termination=True), "throw_on_early_termination"),
    "default dtype": (default_dtype, "float64"),
    "version": (version, "version of phalanx"),
    "wrapped otherwise": (wrapped_otherwise, "rank 1"),
    "assigned": (assigned, "rank 1"),
    "on_nonfinite": (argument("on_nonfinite", None, "skip"), "on_nonfinite"),
    "check_drift_every": (argument("check_drift_every", 2, 3), "check_drift_every"),
    "on_late_mismatch": (argument("on_late_mismatch", "raise", "poison"), "on_late_mismatch"),
    "batched copies": (argument("batched_grad_copy", False, True), "batched_grad_copy"),
    "synchronised at start only": (argument("broadcast_buffers", None, False), "forward_sync_buffers"),
    "precision of reduction": (
        argument("mixed_precision", MixedPrecision(torch.bfloat16), MixedPrecision(reduce_dtype=torch.bfloat16)),
        "mixed_precision",
    ),
    "ratio of top-k": (
        hook(state(hooks.TopKState, hooks.topk_hook, ratio=0.1), state(hooks.TopKState, hooks.topk_hook, ratio=0.2)),
        "ratio of the hook's state is 0.1",
    ),
    "blocks of int8": (
        hook(state(hooks.Int8State, hooks.int8_hook), state(hooks.Int8State, hooks.int8_hook, block_size=64)),
        "block_size",
    ),
    "seed of PowerSGD": (
        hook(
            state(hooks.PowerSGDState, hooks.powerSGD_hook, start_powerSGD_iter=2),
            state(hooks.PowerSGDState, hooks.powerSGD_hook, start_powerSGD_iter=2, random_seed=7),
        ),
        "random_seed",
    ),
    "order of groups": (
        made_of(lambda p: [{"params": p[:3]}, {"params": p[3:]}], lambda p: [{"params": p[3:]}, {"params": p[:3]}]),
        "parameter 0",
    ),
    "decay of a group": (
        made_of(
            lambda p: [{"params": p[:3]}, {"params": p[3:], "weight_decay": 0.1}],
            lambda p: [{"params": p[:3]}, {"params": p[3:], "weight_decay": 0.2}],
        ),
        "weight_decay of group 1",
    ),
    "loader's batches": (loader({"_batch_size": 4}), "batch size 4"),
    "loader's rest": (loader({"_drop_last": True}), "drop_last True"),
    "loader's sampler": (
        loader({"_batch_sampler": BatchSampler(SequentialSampler(range(24)), 2, False)}),
        "rank 1 has batch size None",
    ),
    "loader's end": (loader({"uneven": "drop"}), "uneven drop"),
    "loader split": (loader({"split_batches": True}), "split_batches True"),
    "loader sharded": (loader({"sharded": True}), "rank 1 has samples None"),
    "loader's count": (loader({"count": len}), "count given"),
    "loader's model": (loader({"without": True}), "model not given"),
    "loader's epoch": (loader_moved(lambda made: made.set_epoch(7)), "rank 1 is at epoch 7"),
    "loader's place": (loader_moved(skip_ahead), "position 6"),
    "entries of a mean": (averaged, "{'error': [2], 'loss': number} from rank 1"),
    "checkpoint's step": (saved(saves(2), saves(3)), "save(step=3)"),
    "checkpoint saved or restored": (saved(saves(2), restores()), "restore(step=None)"),
    "checkpoint's step restored": (saved(restores(), restores(step=1)), "restore(step=1)"),
    "checkpoint's parts": (saved(restores(), restores(parts=["model"])), "parts=['model']"),
    "checkpoint's skipped": (saved(restores(), restores(skip=["0.*"])), "skip=['0.*']"),
    "checkpoint's folder": (saved(saves(2), saves(2), folder="other"), "made with folder"),
    "checkpoint's scheduler": (saved(saves(2), saves(2), scheduler=True), "parts model, optimizer, scheduler"),
    "plain lr": (drifts(plain_step, lr=0.2), "rank 1"),
    "plain momentum": (drifts(plain_step, momentum=0.9), "rank 1"),
    "plain decay": (drifts(plain_step, weight_decay=0.1), "rank 1"),
    "plain clipping": (drifts(clips_alone), "rank 1"),
    "plain steps": (drifts(steps_twice), "rank 1"),
}


