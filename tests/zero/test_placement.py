"""Where parameters live: in their own memory, in the buckets, or in one copy for all ranks of a host."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import optim

import phalanx
from phalanx.comm.memory import one_copy
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients
from tests.zero.test_usage import Pair

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

everywhere = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


def storages(model: Given) -> set[int]:
    return {param.untyped_storage().data_ptr() for param in model.parameters() if param.numel()}


def look_at_views(rank: int, world: int, overlapped: bool, backend: str) -> Any:
    model = Given()
    before = [param.clone() for param in model.parameters()]
    strides = [param.stride() for param in model.parameters()]
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, parameters_as_bucket_view=True, overlap_with_ddp=overlapped, lr=0.1
    )
    if overlapped:
        wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=1, on_unused="ignore")
        wrapped([torch.zeros_like(param) for param in model.parameters()]).backward()
    assert all(map(torch.equal, model.parameters(), before))
    assert [param.stride() for param in model.parameters()] == strides
    if backend == "phalanx":
        memory = zero._sharded.collectives._memory  # type: ignore[attr-defined]
        assert all(memory.locate(param) is not None for param in model.parameters() if param.numel())
    return len(storages(model))


@everywhere
@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
def test_parameters_move_into_the_memory_of_their_buckets(overlapped: bool, backend: str) -> None:
    assert run_ranks(2, look_at_views, overlapped, backend, backend=backend) == [1, 1]


def own_memory(rank: int, world: int) -> bool:
    model = Given()
    before = [param.data_ptr() for param in model.parameters()]
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    zero.step()
    return before == [param.data_ptr() for param in model.parameters()]


def test_parameters_stay_where_they_are_unless_asked() -> None:
    assert run_ranks(2, own_memory) == [True, True]


def write_through(rank: int, world: int) -> list[float]:
    """Before the first step, whoever writes writes for all."""
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, shared_parameters=True, lr=0.1)
    dist.barrier()
    if rank == world - 1:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3.0)
    dist.barrier()
    seen = [float(param.view(-1)[0]) for param in model.parameters() if param.numel() and param.dim() < 2]
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    zero.step()
    return seen


@everywhere
def test_shared_parameters_are_one_copy(backend: str) -> None:
    assert run_ranks(3, write_through, backend=backend) == [[3.0] * 4] * 3


def write_outside(rank: int, world: int, how: str, overlapped: bool) -> str:
    model = Given()
    options: dict[str, Any] = {"overlap_with_ddp": overlapped}
    zero = ZeroRedundancyOptimizer(list(model.named_parameters()), optim.SGD, shared_parameters=True, lr=0.1, **options)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=1, on_unused="ignore")

    def step(number: int) -> None:
        zero.zero_grad()
        wrapped(own_gradients(model, number, rank, world)).backward()
        zero.step()

    step(0)
    step(1)
    if how == "in place":
        with torch.no_grad():
            model.weights[1].add_(1.0)
    elif how == "state":
        model.load_state_dict(model.state_dict())
    else:
        model.weights[1].data = model.weights[1].data.clone()
    with pytest.raises(RuntimeError, match="written outside the optimizer") as caught:
        step(3)
    return str(caught.value)


@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("how", ["in place", "state", "other memory"])
def test_a_write_to_shared_parameters_outside_the_optimizer_is_noticed(how: str, overlapped: bool) -> None:
    for text in run_ranks(2, write_outside, how, overlapped):
        assert "weights." in text


def step_by_another(rank: int, world: int) -> list[torch.Tensor]:
    """The optimizer that shared the parameters is gone; they are still one copy."""
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, shared_parameters=True, lr=0.1)
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    zero.step()
    del zero
    plain = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD\.step\(\): its parameters are still one copy"):
        plain.step()
    dist.barrier()
    for param in model.parameters():
        param.data = param.data.clone()
    plain.step()
    return [param.detach() for param in model.parameters()]


def test_no_other_optimizer_steps_parameters_that_are_one_copy() -> None:
    model = Given()
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    plain = optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    plain.step()
    for stepped in run_ranks(2, step_by_another):
        assert all(map(torch.equal, stepped, model.parameters()))


def on_two_hosts(rank: int, world: int) -> None:
    with (
        mock.patch.object(one_copy, "_host_mark", return_value=[rank, 0, 0]),
        pytest.raises(ValueError, match=r"ranks \[1\] run on another host"),
    ):
        ZeroRedundancyOptimizer(Given().parameters(), optim.SGD, shared_parameters=True, lr=0.1)


def test_ranks_of_two_hosts_cannot_share_parameters() -> None:
    run_ranks(2, on_two_hosts)


def one_rank(rank: int, world: int) -> str:
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, shared_parameters=True, lr=0.1)
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    zero.step()
    return zero.partition


def test_one_rank_has_nobody_to_share_with() -> None:
    assert run_ranks(1, one_rank) == ["parameter"]


def turn_around(rank: int, world: int, mode: dict[str, Any]) -> Any:
    """The same memory in another order, which no address tells of."""
    build = lambda: Given(((20, 20), (40,)))  # noqa: E731
    pair = Pair(mode["overlapped"], optim.Adam, build=build, zero_options=mode["options"], lr=0.01)
    found = [pair.step(0)]
    for model in (pair.plain_model, pair.model):
        param = next(model.parameters())
        param.data = param.data.t()
    return [*found, pair.step(1), pair.step(3)]


@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("views", [False, True], ids=["own memory", "bucket views"])
def test_parameters_whose_memory_is_read_in_another_order(views: bool, overlapped: bool) -> None:
    mode = {"overlapped": overlapped, "options": {"parameters_as_bucket_view": views}}
    assert run_ranks(2, turn_around, mode) == [[[]] * 3] * 2


def step_by_other_dtype(rank: int, world: int) -> list[Any]:
    """Gradients of a dtype that users chose apart from the parameters', and back."""
    pair = Pair(False, optim.SGD, build=lambda: Given(((300,), (70,)), torch.bfloat16), lr=0.05)
    found = []
    for step, dtype in enumerate((torch.float32, torch.bfloat16)):
        for model in (pair.plain_model, pair.model):
            for param, grad in zip(model.parameters(), mean_gradients(model, step), strict=True):
                param.grad = None
                param.grad_dtype = dtype  # type: ignore[assignment]
                param.grad = grad.to(dtype)  # type: ignore[union-attr]
        pair.plain.step()
        pair.zero.step()
        found.append(differing(pair.model, sample(pair.plain_model)))
    return found


def test_gradients_of_another_dtype_than_their_parameters() -> None:
    assert run_ranks(2, step_by_other_dtype) == [[[]] * 2] * 2
