"""Groups that torch.distributed has not made, as torchft has them; and parameters that are DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from tests.cluster import run_ranks


class Relay(dist.ProcessGroup):
    """A group in Python, in no map of torch's: hands every call to another group, as torchft's do."""

    def __init__(self, group: Any, with_future: bool) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._with_future = with_future
        self.calls: list[str] = []

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.calls.append("allreduce")
        return self._finished(self._group.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.calls.append("broadcast")
        return self._finished(self._group.broadcast(tensors, opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self.calls.append("allgather")
        return self._finished(self._group.allgather(outputs, inputs, opts), outputs)

    def getSize(self) -> int:
        return int(self._group.size())

    def getBackendName(self) -> str:
        return "relay"

    def _finished(self, work: Any, result: Any) -> Any:
        if not self._with_future:
            return work
        work.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)


def _train(cls: Any, group: Any, rank: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # replicated from rank 0 at construction
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    ddp = cls(model, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(batch).pow(2).sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in ddp.parameters()]


def _over_a_relay(rank: int, world: int, with_future: bool) -> bool:
    group = Relay(dist.group.WORLD, with_future)
    with pytest.raises(ValueError):
        dist.get_rank(group)
    ours = _train(phalanx.DistributedDataParallel, group, rank)
    reference = _train(TorchDDP, dist.group.WORLD, rank)
    assert {"allreduce", "broadcast", "allgather"} <= set(group.calls)
    return all(map(torch.equal, ours, reference))


@pytest.mark.parametrize("with_future", [False, True])
def test_a_group_that_torch_has_not_made_is_taken(with_future: bool) -> None:
    assert run_ranks(2, _over_a_relay, with_future, allow_leaks=("groups", "threads")) == [True, True]


def _mismatched_over_a_relay(rank: int, world: int) -> str:
    with pytest.raises(phalanx.PhalanxError) as raised:
        phalanx.DistributedDataParallel(torch.nn.Linear(3, 2 + rank), process_group=Relay(dist.group.WORLD, False))
    return str(raised.value)


def test_models_that_differ_are_named_over_such_a_group_too() -> None:
    for said in run_ranks(2, _mismatched_over_a_relay):
        assert "shape [2, 3]" in said and "shape [3, 3]" in said


def _zero_over_a_relay(rank: int, world: int) -> bool:
    def trained(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5)
        optimizer = make(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 7), step + 1.0)).pow(2).sum().backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    group = Relay(dist.group.WORLD, False)
    sharded = trained(
        lambda params: phalanx.ZeroRedundancyOptimizer(params, torch.optim.Adam, process_group=group, lr=0.1)
    )
    plain = trained(lambda params: torch.optim.Adam(params, lr=0.1))
    return all(map(torch.equal, sharded, plain))


def test_zero_takes_such_a_group_too() -> None:
    assert run_ranks(2, _zero_over_a_relay) == [True, True]


def _distributed_parameters(rank: int, world: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    # On the ranks of one half only, as a mistake would have it, the model would not even be parallel.
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    with pytest.raises(phalanx.PhalanxError) as raised:
        phalanx.DistributedDataParallel(model, process_group=mesh["data"].get_group())
    phalanx.DistributedDataParallel(model, device_mesh=mesh["data"])
    return [str(raised.value)]


def test_dtensors_are_refused_on_every_rank_unless_the_mesh_is_given() -> None:
    for (said,) in run_ranks(4, _distributed_parameters, allow_leaks=("groups", "threads")):
        assert "'0.weight' is a DTensor" in said and "device_mesh=" in said
