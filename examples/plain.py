"""Data-parallel training in its plainest form.

    python examples/plain.py                          alone
    phalanx run --nproc 2 examples/plain.py           two workers
    torchrun --nproc-per-node 2 examples/plain.py     the same under torchrun
"""

import torch
from torch import nn

import phalanx


def main() -> None:
    worker = phalanx.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(worker.device)
    model = phalanx.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + worker.rank)  # every rank sees data of its own
    first = last = 0.0
    for step in range(60):
        x = torch.randn(32, 8, device=worker.device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over all ranks here
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    if worker.is_first:
        print(f"loss {first:.3f} -> {last:.3f} on {worker.world} workers")


if __name__ == "__main__":
    main()
