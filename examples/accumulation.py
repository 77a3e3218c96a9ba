"""Gradient accumulation: several small batches, one reduction, one step.

`no_sync` keeps a backward from reducing; the next one outside reduces the sum of all. The result is that of one
large batch, which this script checks.

    phalanx run --nproc 2 examples/accumulation.py
"""

import torch
from torch import nn

import phalanx

MICRO_BATCHES = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def main() -> None:
    worker = phalanx.init()
    accumulated, whole = build(), build()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (accumulated, whole)]
    torch.manual_seed(100 + worker.rank)
    for _ in range(20):
        batch = torch.randn(32, 8)
        for optimizer in optimizers:
            optimizer.zero_grad()

        *early, last = batch.chunk(MICRO_BATCHES)
        with accumulated.no_sync():
            for piece in early:
                (loss_of(accumulated, piece) / MICRO_BATCHES).backward()  # adds up locally
        (loss_of(accumulated, last) / MICRO_BATCHES).backward()  # reduces the sum

        loss_of(whole, batch).backward()
        for optimizer in optimizers:
            optimizer.step()

    pairs = zip(accumulated.parameters(), whole.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    assert difference < 1e-5, difference
    if worker.is_first:
        print(f"{MICRO_BATCHES} micro-batches equal one batch to within {difference:.1e}")


if __name__ == "__main__":
    main()
