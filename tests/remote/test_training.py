"""Training over RPC is training in one process, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import phalanx.remote as remote
from tests.remote.optimizers import CASES
from tests.remote.world import layers_on, local_layers, run_rpc, through, values_of, weights_of

SHAPES = [(6, 6)] * 7
NUM_STEPS = 4


def batch(number: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


class Twin:
    """The same layers on the owners and here, and an optimizer over each."""

    def __init__(self, world: int, kind: Any, settings: dict[str, Any], groups: Any = None) -> None:
        self.layers = layers_on([f"worker{rank}" for rank in range(world)], SHAPES)
        self.local = local_layers(SHAPES)
        regroup: Callable[[list[Any]], Any] = groups or (lambda params: params)
        self.ours = remote.DistributedOptimizer(kind, regroup(weights_of(self.layers)), **settings)
        self.plain = kind(regroup([layer.weight for layer in self.local]), **settings)

    def backward(self, number: int, context_id: int) -> None:
        # The last layer stays out of it, and has no gradient.
        dist_autograd.backward(context_id, [through(self.layers[:-1], batch(number)).sum()])

    def backward_here(self, number: int) -> None:
        x = batch(number)
        for layer in self.local[:-1]:
            x = layer.forward(x)
        x.sum().backward()

    def step(self, number: int) -> None:
        with dist_autograd.context() as context_id:
            self.backward(number, context_id)
            self.ours.step(context_id)
        self.plain.zero_grad()
        self.backward_here(number)
        self.plain.step()

    def agree(self) -> bool:
        return all(map(torch.equal, values_of(self.layers), [layer.get() for layer in self.local]))


def train_all(world: int) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for number, (kind, settings) in enumerate(CASES):
        twin = Twin(world, kind, settings)
        untouched = twin.local[-1].get()
        for step in range(NUM_STEPS):
            twin.step(step)
        assert torch.equal(values_of(twin.layers[-1:])[0], untouched)
        found[f"{number} {kind.__name__}"] = twin.agree()
    return found


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_optimizer_is_bit_equal_to_local_training(world: int) -> None:
    found = run_rpc(world, train_all, world)
    assert len(found) == len(CASES) and all(found.values()), found


def two_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "lr": 0.1}, {"params": params[4:], "momentum": 0.5}]


def use_groups() -> None:
    twin = Twin(3, optim.SGD, {"lr": 0.01, "momentum": 0.9}, two_groups)
    groups = twin.ours.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.01]
    assert [group["momentum"] for group in groups] == [0.9, 0.5]
    assert [len(group["params"]) for group in groups] == [4, 3]
    assert twin.ours.defaults["lr"] == 0.01
    twin.step(0)
    for optimizer in (twin.ours, twin.plain):
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1]["weight_decay"] = 0.1
        optimizer.param_groups[1]["mine"] = "kept"
    twin.step(1)
    assert twin.agree()
    # New layers, one of them on a worker that had no part in this optimizer so far.
    more = [(6, 6), (6, 6)]
    twin.layers[:0] = layers_on(["worker3", "worker1"], more)
    twin.local[:0] = local_layers(more)
    twin.ours.add_param_group({"params": weights_of(twin.layers[:2]), "lr": 0.3})
    twin.plain.add_param_group({"params": [layer.weight for layer in twin.local[:2]], "lr": 0.3})
    twin.step(2)
    twin.step(3)
    assert twin.agree()
    assert set(twin.ours.owners) == {"worker0", "worker1", "worker2", "worker3"}
    saved, plain = twin.ours.state_dict(), twin.plain.state_dict()
    assert saved["param_groups"] == plain["param_groups"]


def test_groups_are_set_read_changed_and_added() -> None:
    run_rpc(4, use_groups)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=6),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.3, anneal_epochs=3),
}


def schedule(names: list[str]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name in names:
        twin = Twin(3, optim.SGD, {"lr": 0.1, "momentum": 0.9})
        schedulers = [SCHEDULERS[name](optimizer) for optimizer in (twin.ours, twin.plain)]
        for number in range(NUM_STEPS):
            twin.step(number)
            for scheduler in schedulers:
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates = [optimizer.param_groups[0]["lr"] for optimizer in (twin.ours, twin.plain)]
        found[name] = twin.agree() and rates[0] == rates[1] != 0.1
    return found


@pytest.mark.thorough
def test_torchs_schedulers_drive_it() -> None:
    found = run_rpc(3, schedule, list(SCHEDULERS))
    assert all(found.values()), found


def schedule_a_tensor_rate() -> bool:
    twin = Twin(3, optim.Adam, {"lr": torch.tensor(0.1)})
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (twin.ours, twin.plain)]
    for number in range(NUM_STEPS):
        twin.step(number)
        for scheduler in schedulers:
            scheduler.step()
    return twin.agree() and torch.equal(twin.ours.param_groups[0]["lr"], twin.plain.param_groups[0]["lr"])


def test_a_rate_in_a_tensor_changed_in_place_reaches_the_owners() -> None:
    assert run_rpc(3, schedule_a_tensor_rate)


def accumulate() -> None:
    twin = Twin(3, optim.Adam, {"lr": 0.1})
    for number in range(3):
        with dist_autograd.context() as context_id:
            twin.backward(number, context_id)
            twin.ours.accumulate(context_id)
        twin.backward_here(number)
    twin.ours.step()
    twin.plain.step()
    assert twin.agree()
    # The last context goes to `step` itself; one that is named twice counts once.
    twin.plain.zero_grad()
    with dist_autograd.context() as context_id:
        twin.backward(3, context_id)
        twin.ours.accumulate(context_id)
    with dist_autograd.context() as context_id:
        twin.backward(4, context_id)
        twin.ours.accumulate(context_id)
        timings = twin.ours.step(context_id)
    assert sum(timing.num_updated for timing in timings.values()) == 6
    for number in (3, 4):
        twin.backward_here(number)
    twin.plain.step()
    assert twin.agree()
    # Dropped gradients have no effect.
    with dist_autograd.context() as context_id:
        twin.backward(5, context_id)
        twin.ours.accumulate(context_id)
    twin.ours.zero_grad()
    twin.step(6)
    assert twin.agree()


def test_gradients_accumulate_over_contexts() -> None:
    run_rpc(3, accumulate)


def clip(norm_type: float, max_norm: float, accumulated: bool) -> None:
    twin = Twin(4, optim.SGD, {"lr": 0.1, "momentum": 0.9})
    weights = [layer.weight for layer in twin.local]
    for number in range(2):
        twin.plain.zero_grad()
        with dist_autograd.context() as first:
            twin.backward(10 + number, first)
            if accumulated:
                twin.ours.accumulate(first)
                twin.backward_here(10 + number)
        with dist_autograd.context() as context_id:
            twin.backward(number, context_id)
            total = twin.ours.clip_grad_norm_(context_id, max_norm, norm_type)
            twin.ours.step(context_id)
        twin.backward_here(number)
        expected = nn.utils.clip_grad_norm_(weights, max_norm, norm_type)
        twin.plain.step()
        assert torch.equal(total, expected) and twin.agree()


def clip_in_every_way() -> None:
    for norm_type, max_norm in [(2.0, 0.1), (float("inf"), 0.01), (1.0, 1e6)]:
        for accumulated in (False, True):
            clip(norm_type, max_norm, accumulated)


def test_clipping_is_exact_across_workers() -> None:
    run_rpc(4, clip_in_every_way)


def poison(rref: Any) -> None:
    with torch.no_grad():
        rref.local_value().weight.fill_(float("nan"))


def clip_nonfinite() -> str:
    twin = Twin(3, optim.SGD, {"lr": 0.1})
    rpc.rpc_sync(twin.layers[1].owner(), poison, args=(twin.layers[1],))
    with dist_autograd.context() as context_id:
        twin.backward(0, context_id)
        try:
            twin.ours.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_norm_that_is_not_finite_is_an_error_when_asked() -> None:
    assert "total norm of order 2.0 is nan" in run_rpc(3, clip_nonfinite)


class Table:
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.embedding(rows)

    def weight(self) -> Tensor:
        return self.embedding.weight

    def get(self) -> Tensor:
        return self.embedding.weight.detach().clone()


def train_sparse() -> list[bool]:
    found: list[bool] = []
    for kind, settings in ((optim.SGD, {"lr": 0.1}), (optim.Adagrad, {"lr": 0.1}), (optim.SparseAdam, {"lr": 0.1})):
        table, here = rpc.remote("worker1", Table), Table()
        ours = remote.DistributedOptimizer(kind, [table.remote().weight()], **settings)
        plain = kind([here.embedding.weight], **settings)
        for number in range(3):
            rows = torch.tensor([number, 7, 7])
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [table.rpc_sync().forward(rows).square().sum()])
                ours.step(context_id)
            plain.zero_grad()
            here.forward(rows).square().sum().backward()
            plain.step()
        found.append(torch.equal(table.rpc_sync().get(), here.get()))
    return found


def test_sparse_embeddings_are_trained() -> None:
    assert run_rpc(2, train_sparse) == [True] * 3


def leave_an_owner_out() -> dict[str, int]:
    layers = layers_on(["worker1", "worker2"], SHAPES[:2])
    ours = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=0.1)
    before = values_of(layers)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers[:1], batch(0)).sum()])
        timings = ours.step(context_id)
    after = values_of(layers)
    assert not torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert all(timing.update_s > 0 and timing.waited_s >= 0 for timing in timings.values())
    return {name: timing.num_updated for name, timing in timings.items()}


def test_an_owner_outside_the_forward_pass_is_left_alone() -> None:
    assert run_rpc(3, leave_an_owner_out) == {"worker1": 1, "worker2": 0}


def grad_of(layer: Any) -> Tensor | None:
    return layer.local_value().weight.grad


def set_grad(layer: Any) -> None:
    layer.local_value().weight.grad = torch.full((6, 6), 7.0)


def keep_grads() -> None:
    layers = layers_on(["worker1"], SHAPES[:1])
    ours = remote.DistributedOptimizer(optim.Adafactor, weights_of(layers))
    rpc.rpc_sync("worker1", set_grad, args=(layers[0],))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, batch(0)).sum()])
        ours.step(context_id)
    grad = rpc.rpc_sync("worker1", grad_of, args=(layers[0],))
    assert grad is not None and bool((grad == 7.0).all())
    ours.zero_grad(set_to_none=False)
    assert torch.equal(rpc.rpc_sync("worker1", grad_of, args=(layers[0],)), torch.zeros(6, 6))
    ours.zero_grad()
    assert rpc.rpc_sync("worker1", grad_of, args=(layers[0],)) is None


def test_grad_attributes_on_the_owner_survive_a_step_and_are_zeroed_on_demand() -> None:
    run_rpc(2, keep_grads)


def stay_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rpc.rpc_sync("worker1", warnings.simplefilter, args=("error",))
        layers = layers_on(["worker1", "worker0"], SHAPES[:2])
        for kind in (optim.SGD, optim.Adam, optim.Adafactor):
            ours = remote.DistributedOptimizer(kind, weights_of(layers))
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [through(layers, batch(0)).sum()])
                ours.step(context_id)


def test_no_warning_is_given() -> None:
    run_rpc(2, stay_silent)


def use_hooks() -> list[str]:
    layers = layers_on(["worker1"], SHAPES[:1])
    ours = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=0.1)
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    ours.register_state_dict_post_hook(lambda _, saved: seen.append("saved"))
    ours.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, batch(0)).sum()])
        ours.step(context_id)
    ours.load_state_dict(ours.state_dict())
    return seen


def test_optimizer_hooks_are_called() -> None:
    assert run_rpc(2, use_hooks) == ["before", "after", "saved", "loaded"]


class Counting(optim.SGD):
    """Keeps figures in its groups, as optimizers with a learned rate do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["norm"] = float(sum(param.grad.norm() for param in group["params"] if param.grad is not None))
        super().step()


def watch_options() -> None:
    layers = layers_on(["worker1", "worker2"], SHAPES[:2])
    ours = remote.DistributedOptimizer(Counting, weights_of(layers), lr=0.1)
    for number in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [through(layers, batch(number)).sum()])
            ours.step(context_id)
    group = ours.param_groups[0]
    assert group["count"] == 3
    assert isinstance(group["norm"], remote.PerOwner) and set(group["norm"]) == {"worker1", "worker2"}
    saved = ours.state_dict()
    assert saved["param_groups"][0]["norm"] == group["norm"]
    group["norm"] = 0.0
    assert ours.state_dict()["param_groups"][0]["norm"] == 0.0
    ours.load_state_dict(saved)
    assert ours.param_groups[0] is group and group["norm"] == saved["param_groups"][0]["norm"]


def test_options_that_the_optimizer_changes_by_itself_are_seen() -> None:
    run_rpc(3, watch_options)
