"""Ranks with unequally many batches: inside `join`, those that are out of data answer for the others' sake.

    phalanx run --nproc 3 examples/uneven_inputs.py
"""

import torch
from torch import nn

import phalanx


def main() -> None:
    worker = phalanx.init()
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    torch.manual_seed(100 + worker.rank)
    num_batches = 10 + 5 * worker.rank  # the last rank has most
    with model.join():
        for _ in range(num_batches):
            x = torch.randn(16, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    # Everybody leaves with the model of the rank that trained longest.
    weight = model.module.weight.detach().flatten()
    print(f"rank {worker.rank} trained on {num_batches} batches, weight sum {weight.sum().item():.6f}")


if __name__ == "__main__":
    main()
