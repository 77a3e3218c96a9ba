"""The wrapper as a module: states, pickling, attributes, containers, arguments and errors."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import phalanx
from phalanx.ddp.buckets.tail import exact_ranks
from phalanx.errors import StateError
from tests.cluster import run_ranks
from tests.ddp.zoo import batch, make

Pair = namedtuple("Pair", ["a", "b"])


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def states(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    with_prefix = wrapped.state_dict()
    assert all(name.startswith("module.") for name in with_prefix)
    other = phalanx.DistributedDataParallel(make("mlp", seed=5))
    other.load_state_dict(with_prefix)
    assert torch.equal(other.module.layers[0].weight, wrapped.module.layers[0].weight)
    other = phalanx.DistributedDataParallel(make("mlp", seed=5))
    other.load_state_dict(wrapped.module.state_dict())
    assert torch.equal(other.module.layers[0].weight, wrapped.module.layers[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"layers.0.weight": with_prefix["module.layers.0.weight"]})


def test_states_load_with_and_without_the_prefix() -> None:
    run_ranks(1, states)


def pickled(rank: int, world: int) -> list[torch.Tensor]:
    wrapped = phalanx.DistributedDataParallel(make("mlp"), gradient_as_bucket_view=True)
    _loss(wrapped, 0, rank).backward()
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    cloned = copy.deepcopy(wrapped)
    for model in (again, cloned):
        model.zero_grad()
        _loss(model, 1, rank).backward()
    group = dist.new_group(list(range(world)))
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(phalanx.DistributedDataParallel(make("mlp"), process_group=group))
    pairs = zip(again.parameters(), cloned.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    return [param.grad.clone() for param in again.parameters()]


def test_a_pickle_of_torchs_wrapper_is_refused_with_what_to_do() -> None:
    with pytest.raises(StateError, match="save its `state_dict"):
        phalanx.DistributedDataParallel.__new__(phalanx.DistributedDataParallel).__setstate__({"static_graph": False})


def test_a_pickled_or_copied_wrapper_goes_on_reducing() -> None:
    first, second = run_ranks(2, pickled)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.motto = "together"

    def describe(self) -> str:
        return f"{self.motto}: {self.layer.out_features}"

    def forward(self, x: Any, kind: str = "plain") -> Any:
        if kind == "pair":
            return Pair(self.layer(x["deep"][0].value), None)
        if kind == "dataclass":
            return Box(self.layer(x))
        if kind == "opaque":
            return Opaque(self.layer(x))
        if kind == "ordered":
            return OrderedDict(first=[self.layer(x)])
        if kind == "parameter":
            return self.layer.weight
        return self.layer(x)


@dataclasses.dataclass
class Box:
    value: torch.Tensor


class Opaque:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def outputs(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    wrapped = phalanx.DistributedDataParallel(Talkative(), on_unused="ignore")
    assert wrapped.motto == "together" and wrapped.describe() == "together: 4"
    with pytest.raises(AttributeError, match="'Talkative' object has no attribute 'nonsense'") as missing:
        _ = wrapped.nonsense
    assert missing.value.__context__ is None  # one traceback, of the model's, and not another for the wrapper
    assert wrapped.train() is wrapped and wrapped.eval().training is False
    wrapped.train()
    grads = []
    x = torch.full((2, 8), float(rank + 1))
    calls = {
        "pair": lambda: wrapped({"deep": [Box(x)]}, kind="pair").a,
        "dataclass": lambda: wrapped(x, kind="dataclass").value,
        "opaque": lambda: wrapped(x, kind="opaque").hidden,
        "ordered": lambda: wrapped(x, kind="ordered")["first"][0],
        "parameter": lambda: wrapped(x, kind="parameter") * (rank + 1),
    }
    for name, call in calls.items():
        for _ in range(2):
            wrapped.zero_grad()
            call().sum().backward()
        assert wrapped.reducer.step > 0
        expected = torch.full((4, 8), (world + 1) / 2 * (1 if name == "parameter" else 2))
        torch.testing.assert_close(wrapped.module.layer.weight.grad, expected, msg=name)
        grads.append(wrapped.module.layer.weight.grad.clone())
    assert not wrapped.module.layer.weight._backward_hooks, "watching a parameter leaves no hook behind"
    return grads


def test_outputs_of_any_shape_are_reduced_and_attributes_fall_through() -> None:
    run_ranks(2, outputs)


def unused_output(rank: int, world: int) -> None:
    model = make("many_outputs")
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore")
    x, _ = batch(0, rank)
    output = wrapped(x)
    spare = output["spare"][0]
    spare.retain_grad()
    output["main"][0].add_(1).sum().backward()  # in place on an output, too
    assert spare.grad is None and model.right.weight.grad is None and model.left.weight.grad is not None


def test_gradients_of_unused_outputs_stay_none_and_outputs_may_be_changed_in_place() -> None:
    run_ranks(2, unused_output)


def refused(rank: int, world: int) -> None:
    wrap: Any = phalanx.DistributedDataParallel
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        wrap(nn.ReLU())
    with pytest.raises(RuntimeError, match=r"uninitialized parameters.*'0\.weight'"):
        wrap(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="device_ids"):
        wrap(nn.Linear(2, 2), device_ids=[0, 1])
    with pytest.raises(ValueError, match="device_ids and output_device"):
        wrap(nn.Linear(2, 2), device_ids=[0])
    with pytest.raises(ValueError, match=r"same type of devices.*'1\.weight' on meta"):
        wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(RuntimeError, match="process_group and device_mesh"):
        wrap(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(TypeError, match="process_group"):
        wrap(nn.Linear(2, 2), process_group="gloo")
    with pytest.raises(ValueError, match="on_unused"):
        wrap(nn.Linear(2, 2), on_unused="shout")
    with pytest.raises(ValueError, match="caps"):
        wrap(nn.Linear(2, 2), bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        wrap(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrap(nn.Linear(2, 2), check_reduction=True)
    meshed = wrap(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (world,)))
    meshed(torch.ones(1, 2)).sum().backward()
    assert meshed.stats().num_steps == 1


def test_arguments_that_cannot_be_honoured_are_refused() -> None:
    run_ranks(2, refused)


def no_group(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"not been initialized.*phalanx\.init"):
        phalanx.DistributedDataParallel(nn.Linear(2, 2))


def test_without_a_group_the_error_says_how_to_make_one() -> None:
    run_ranks(1, no_group, backend=None)


def different_models(rank: int, world: int, what: str) -> str:
    layers = {
        "shape": lambda: nn.Linear(4, 3 if rank == 1 else 2),
        "dtype": lambda: nn.Linear(4, 2).to(torch.float64 if rank == 1 else torch.float32),
        "count": lambda: nn.Linear(4, 2, bias=rank != 1),
        "name": lambda: nn.Sequential(OrderedDict([("x" if rank == 1 else "y", nn.Linear(4, 2))])),
        "stride": lambda: nn.Conv2d(3, 4, 3).to(
            memory_format=torch.channels_last if rank == 1 else torch.contiguous_format
        ),
        "caps": lambda: nn.Linear(4, 2),
        "views": lambda: nn.Linear(4, 2),
    }
    options: dict[str, Any] = {}
    if what == "caps":
        options["bucket_cap_mb"] = 1 + rank
    if what == "views":
        options["gradient_as_bucket_view"] = rank == 1
    with pytest.raises(RuntimeError) as raised:
        phalanx.DistributedDataParallel(layers[what](), **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["'weight'", "[2, 4]", "[3, 4]", "rank 1"]),
        ("dtype", ["float64", "float32", "rank 1"]),
        ("count", ["'bias'", "no such parameter", "rank 1"]),
        ("name", ["'y.weight'", "'x.weight'"]),
        ("stride", ["'weight'", "stride"]),
        ("caps", ["bucket_cap_mb", "rank 1"]),
        ("views", ["gradient_as_bucket_view is False on rank 0, 2, True on rank 1"]),
    ],
)
def test_ranks_with_different_models_are_told_the_first_difference(what: str, words: list[str]) -> None:
    for rank, message in enumerate(run_ranks(3, different_models, what)):
        assert message.startswith(f"rank {rank}")
        for word in words:
            assert word in message, f"{word} missing in: {message}"


def out_of_step(rank: int, world: int) -> str:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    for step in range(2):
        _loss(wrapped, step, rank).backward()
    wrapped.reducer.step += rank  # as if rank 1 had taken part in one reduction more
    with pytest.raises(phalanx.PhalanxError) as raised:
        _loss(wrapped, 2, rank).backward()
    return str(raised.value)


def test_ranks_at_different_steps_are_told_so_by_the_tail() -> None:
    for rank, message in enumerate(run_ranks(2, out_of_step)):
        assert f"rank {rank}: step {2 + rank}" in message
        assert "rank 0: step 2 of wrapper 1" in message and "rank 1: step 3 of wrapper 1" in message


def test_counts_are_exact_in_every_dtype_of_a_tail() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        most = exact_ranks(dtype)
        assert torch.tensor(float(most), dtype=dtype).item() == most
        assert torch.tensor(float(most - 1), dtype=dtype).item() == most - 1


def measured(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(make("gpt"), bucket_cap_mb=0.001)
    for step in range(4):
        _loss(wrapped, step, rank).backward()
    stats = wrapped.stats()
    assert stats.num_steps == 4 and stats.step == 3 and len(stats.buckets) == len(wrapped.plan.buckets) > 3
    assert stats.num_rebuilds <= 1 and stats.plan_hash == wrapped.plan.hash
    for bucket in stats.buckets:
        assert 0 < bucket.ready_ms <= bucket.launched_ms <= bucket.finished_ms
    launched = [bucket.launched_ms for bucket in stats.buckets]
    assert launched == sorted(launched), "buckets leave in plan order"
    assert sum(moment < stats.backward_ms for moment in launched) >= len(launched) - 1, "all but the last overlap"
    assert 0 <= stats.overlap <= 1 and "bucket" in str(stats)


def test_stats_show_that_all_buckets_but_the_last_leave_during_backward() -> None:
    run_ranks(2, measured)


def swapped(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(nn.Linear(2, 2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # Hooks would stay behind, and gradients be those of each rank.
        with pytest.raises(RuntimeError, match="swap"):
            wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        with pytest.raises(RuntimeError, match="swap"):
            wrapped.double()
        nn.Linear(2, 2).double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    wrapped(torch.full((1, 2), float(rank))).sum().backward()
    assert wrapped.module.weight.grad.eq((world - 1) / 2).all()


def test_parameters_of_a_wrapper_are_not_swapped_for_others_as_in_torch() -> None:
    run_ranks(2, swapped)


def jit_traced(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    x = batch(0, rank)[0]
    traced = torch.jit.trace(wrapped, (x,))
    torch.testing.assert_close(traced(x), wrapped.module(x))
    _loss(wrapped, 0, rank).backward()


def test_a_wrapper_can_be_traced_by_jit() -> None:
    run_ranks(2, jit_traced)
