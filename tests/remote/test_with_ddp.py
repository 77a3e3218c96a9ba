"""A replicated dense part in DDP, embeddings on parameter servers, one optimizer over both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim

import phalanx
import phalanx.remote as remote
from tests.cluster import spawn_ranks
from tests.remote.world import checked

NUM_TRAINERS, NUM_STEPS = 2, 4


class Table:
    """An embedding on a parameter server."""

    def __init__(self, seed: int) -> None:
        self.weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()

    def look_up(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.weight)

    def param(self) -> Tensor:
        return self.weight

    def get(self) -> Tensor:
        return self.weight.detach().clone()


def dense() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def rows_of(trainer: int, step: int) -> Tensor:
    return torch.randint(0, 8, (5,), generator=torch.Generator().manual_seed(10 * step + trainer))


def train(rank: int, world: int, views: bool) -> tuple[list[Tensor], list[Tensor]] | None:
    """Trainers 0 and 1 with their own embedding tables each, so that the arithmetic has one order."""
    trainers = dist.new_group(list(range(NUM_TRAINERS)))
    with remote.init(f"worker{rank}"):
        if rank >= NUM_TRAINERS:
            return None
        tables = [rpc.remote(f"worker{NUM_TRAINERS + which}", Table, args=(10 * rank + which,)) for which in (0, 1)]
        model = phalanx.DistributedDataParallel(dense(), process_group=trainers, gradient_as_bucket_view=views)
        if views:
            model(torch.ones(1, 8)).sum().backward()  # of the user's own, in memory that every reduction uses
        held = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        params = [*(table.remote().param() for table in tables), *map(rpc.RRef, model.parameters())]
        optimizer = remote.DistributedOptimizer(optim.Adam, params, lr=0.05)
        for step in range(NUM_STEPS):
            with dist_autograd.context() as context_id:
                rows = rows_of(rank, step)
                found = [table.rpc_async().look_up(rows) for table in tables]
                loss = model(torch.cat([part.wait() for part in found], 1)).sum()
                dist_autograd.backward(context_id, [loss])
                timings = optimizer.step(context_id)
            assert sum(timing.num_updated for timing in timings.values()) == 6
        for param, grad in zip(model.parameters(), held, strict=True):
            assert param.grad is None if grad is None else torch.equal(param.grad, grad)  # type: ignore[arg-type]
        values = [param.detach().clone() for param in model.parameters()]
        return values, [table.rpc_sync().get() for table in tables]


def train_here() -> tuple[list[Tensor], list[list[Tensor]]]:
    """The same in one process: the mean of the trainers' gradients for the dense part, own ones for the tables."""
    model = dense()
    tables = [[Table(10 * trainer + which) for which in (0, 1)] for trainer in range(NUM_TRAINERS)]
    optimizers = [optim.Adam(model.parameters(), lr=0.05)]
    optimizers += [optim.Adam([table.weight for table in own], lr=0.05) for own in tables]
    for step in range(NUM_STEPS):
        grads: list[list[Tensor]] = []
        for trainer, own in enumerate(tables):
            for optimizer in (optimizers[0], optimizers[1 + trainer]):
                optimizer.zero_grad()
            rows = rows_of(trainer, step)
            model(torch.cat([table.look_up(rows) for table in own], 1)).sum().backward()
            grads.append([param.grad.clone() for param in model.parameters()])  # type: ignore[union-attr]
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = torch.stack(parts).sum(0) / NUM_TRAINERS
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach() for param in model.parameters()], [[table.get() for table in own] for own in tables]


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_ddp_and_remote_embeddings_are_trained_by_one_optimizer(views: bool) -> None:
    values = checked(spawn_ranks(NUM_TRAINERS + 2, train, views))
    expected_dense, expected_tables = train_here()
    for rank in range(NUM_TRAINERS):
        model, tables = values[rank]
        assert all(map(torch.equal, model, values[0][0]))
        # A mean of two is exact in either order, so this is equal to the bit as well.
        assert all(map(torch.equal, model, expected_dense))
        assert all(map(torch.equal, tables, expected_tables[rank]))
