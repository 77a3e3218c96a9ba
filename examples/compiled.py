"""torch.compile that keeps the overlap: the graph is cut where gradient buckets close.

    phalanx run --nproc 2 examples/compiled.py            compiled by inductor (needs a C++ compiler)
    phalanx run --nproc 2 examples/compiled.py aot_eager  without one
"""

import sys

import torch
from torch import nn

import phalanx


def main() -> None:
    inner = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    worker = phalanx.init()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    # Small buckets, so that this small model has several.
    model = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.02)
    compiled = torch.compile(model, backend="phalanx", options={"compiler": inner})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + worker.rank)
    first = last = 0.0
    for step in range(30):
        x = torch.randn(32, 64)
        loss = (compiled(x) - x[:, :4].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    if worker.is_first:
        print(f"loss {first:.3f} -> {last:.3f}, compiled by {inner}, {len(model.plan.buckets)} buckets")


if __name__ == "__main__":
    main()
