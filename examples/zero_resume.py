"""ZeRO: optimizer state divided among the ranks, saved, and resumed on another number of ranks.

    phalanx run --nproc 2 examples/zero_resume.py checkpoint.pt --steps 20
    phalanx run --nproc 3 examples/zero_resume.py checkpoint.pt --steps 20     # goes on from there

The file holds what plain torch would save: `torch.optim.AdamW` loads it, and this script loads plain torch's.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import phalanx


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    worker = phalanx.init()
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    # Each bucket is reduced, stepped and gathered while backward goes on.
    optimizer = phalanx.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2
    )
    start = 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]

    loss = torch.zeros(())
    for step in range(start, start + arguments.steps):
        # Data depends on step and rank only, so a resumed run sees what an uninterrupted one would.
        generator = torch.Generator().manual_seed(1000 * step + worker.rank)
        x = torch.randn(32, 16, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    optimizer.consolidate_state_dict(to=0)
    memory = optimizer.memory()
    if worker.is_first:
        step = start + arguments.steps
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            arguments.checkpoint,
        )
        held = max(rank.state for rank in memory.ranks)
        print(
            f"steps {start} to {step} on {worker.world} workers, loss {loss.item():.3f}, "
            f"state a rank {held} of {memory.unsharded.state} bytes"
        )
    dist.barrier()  # nobody leaves, and maybe starts again, before the file is there


if __name__ == "__main__":
    main()
