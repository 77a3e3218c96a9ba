"""A user's program that trains a little and ends in one of the ways in which programs end.

    python ends_program.py '{"launcher": "bare", "backend": "gloo", "way": "return", "world": 2, "zero": false, "folder": …}'

With the ways "interrupt" and "terminate" it trains until somebody ends it; a file per rank says that it is under way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import phalanx

READY_AT = 3
LIMIT_S = 180


def train(rank: int, plan: dict[str, Any]) -> None:
    """One rank's program. Nothing is caught, nothing is cleaned up."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(plan["world"]))
    way, rank = plan["way"], int(os.environ["RANK"])
    signal.alarm(LIMIT_S)  # whoever was to end it may be gone
    phalanx.init(backend=plan["backend"], timeout_s=60)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    # Many buckets, so that some are under way whenever something happens.
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.03)
    torch.manual_seed(rank)  # on the same inputs, it would be warned
    optimizer: torch.optim.Optimizer = torch.optim.Adam(wrapped.parameters())
    if plan["zero"]:
        optimizer = phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1e-3)
    step = 0
    while step < READY_AT or way in ("interrupt", "terminate"):
        wrapped(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == READY_AT:
            (Path(plan["folder"]) / f"ready-{rank}").touch()
    if way == "exit":
        sys.exit(0)
    if way == "leave":
        phalanx.launch.worker.leave()
    if way == "destroy":
        dist.destroy_process_group()
    if way == "raise":
        raise ValueError(f"words of rank {rank}")


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan["launcher"] == "spawn":
        torch.multiprocessing.spawn(train, (plan,), plan["world"])
    else:
        train(int(os.environ["RANK"]), plan)


if __name__ == "__main__":
    main()
