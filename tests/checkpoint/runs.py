"""A training run with everything in it that a checkpoint has to bring back, for the tests beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx import Checkpointer, DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.comm.hooks import Int8State, PowerSGDState, TopKState, int8_hook, powerSGD_hook, topk_hook

HOOKS = {
    "int8": (lambda: Int8State(block_size=64), int8_hook),
    "topk": (lambda: TopKState(ratio=0.2), topk_hook),
    "powersgd": (lambda: PowerSGDState(start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook),
}


class Net(nn.Module):
    """Dropout, running statistics, a shared layer and a buffer; sizes on both sides of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.wide = nn.Linear(24, 700)
        self.norm = nn.BatchNorm1d(700)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(700, 24)
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.relu(self.inner(x)))
        return self.out(self.drop(self.norm(self.wide(x))))


class Loader:
    """Shuffled anew in each epoch, divided among ranks, and able to go on in the midst of one."""

    def __init__(self, rank: int, world: int, size: int = 96, batch: int = 4) -> None:
        self._data = torch.randn(size, 24, generator=torch.Generator().manual_seed(5))
        self._rank, self._world, self._batch = rank, world, batch
        self.epoch, self.position = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(self.epoch))
            per_step = self._batch * self._world
            while self.position + per_step <= len(order):
                mine = order[self.position : self.position + per_step][self._rank :: self._world]
                self.position += per_step
                yield self._data[mine]
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Run:
    """One rank of a training run, made of `options`."""

    def __init__(self, rank: int, world: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        cap = options.get("bucket_cap_mb", 0.05)
        static = options.get("static_graph", False)
        self.model: Any = DistributedDataParallel(self.net, bucket_cap_mb=cap, static_graph=static)
        hook = options.get("hook")
        if hook is not None:
            make, function = HOOKS[hook]
            self.model.register_comm_hook(make(), function)
        kind = options.get("optimizer", "overlapped")
        if kind == "plain":
            self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        elif kind == "in_backward":
            self.optimizer = phalanx.optim.apply_in_backward(torch.optim.AdamW, self.net.parameters(), lr=1e-2)
        else:
            self.optimizer = ZeroRedundancyOptimizer(
                self.net.parameters(),
                getattr(torch.optim, options.get("optimizer_class", "AdamW")),
                overlap_with_ddp=kind == "overlapped",
                stage=options.get("stage", 1),
                partition=options.get("partition", "auto"),
                shared_parameters=options.get("shared_parameters", False),
                lr=1e-2,
            )
        schedules = kind != "in_backward"
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [7, 21, 33], 0.5) if schedules else None
        self.loader = Loader(rank, world)
        self.batches = iter(self.loader)
        # After construction, so that ranks draw their own dropout.
        torch.manual_seed(100 + rank)

    def checkpointer(self, folder: str, **options: Any) -> Checkpointer:
        return Checkpointer(folder, self.model, self.optimizer, self.scheduler, self.loader, **options)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(self.batches)
            if hasattr(self.optimizer, "zero_grad"):
                self.optimizer.zero_grad()
            (self.model(batch) - batch.cos()).square().mean().backward()
            if hasattr(self.optimizer, "step"):
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.net.state_dict().items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
