"""What each worker of `phalanx doctor`'s self-test does on the CPU: meet, sum, train three steps, agree.

Run as a module by `phalanx run`'s machinery. Rank 0 prints one JSON line with what it measured.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch import nn

from phalanx.ddp import DistributedDataParallel
from phalanx.launch.worker import Worker, init

_NUMEL = 1 << 18


def main() -> None:
    """Raise on anything that is not as it should be."""
    with init(device="cpu", timeout_s=30) as worker:  # also where there is a GPU, of which two workers may find only one
        seconds = _sum(worker)
        _train(worker)
        if worker.is_first:
            print(json.dumps({"backend": worker.backend, "world": worker.world, "seconds": seconds}))


def _sum(worker: Worker) -> float:
    expected = worker.world * (worker.world + 1) / 2
    best = float("inf")
    for _ in range(5):
        tensor = torch.full((_NUMEL,), float(worker.rank + 1))
        started = time.perf_counter()
        dist.all_reduce(tensor)
        best = min(best, time.perf_counter() - started)
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"rank {worker.rank}: a sum of ranks gave {tensor[0].item()}, not {expected}")
    return best


def _train(worker: Worker) -> None:
    torch.manual_seed(worker.rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    if not torch.equal(mine, first):
        raise RuntimeError(f"rank {worker.rank}: parameters differ from rank 0's after three steps")


if __name__ == "__main__":
    main()
