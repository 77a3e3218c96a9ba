"""A user's program, run whole under a launcher, in which one rank suffers a fault at a chosen moment.

    python program.py '{"program": "zero", "backend": "gloo", "fault": "raise", "moment": "backward", "victim": 1, ...}'

Written as a user would write it: nothing is caught, nothing is cleaned up. With `"launcher": "spawn"` it starts its ranks
itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

import phalanx

WORDS = "the injected words"
STEPS = 5
FAULT_AT = 3  # late enough for plans to be settled and kinds of collectives to be known


class InjectedError(Exception):
    """What a victim raises."""


class Fault:
    """Happens once, on one rank, when its moment has come."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self._plan = plan
        self._armed = rank == plan["victim"] and plan["fault"] != "none"

    def at(self, moment: str, step: int = FAULT_AT) -> None:
        if not self._armed or moment != self._plan["moment"] or step != FAULT_AT:
            return
        self._armed = False
        with open(self._plan["note"], "w") as note:
            note.write("fired")
        fault = self._plan["fault"]
        if fault == "raise":
            raise InjectedError(WORDS)
        if fault == "exit":
            sys.exit(7)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[fault])


def train(rank: int, plan: dict[str, Any]) -> None:
    """One rank's program."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(plan["world"]))
    fault = Fault(plan, int(os.environ["RANK"]))
    fault.at("start")
    phalanx.init(backend=plan["backend"], timeout_s=plan["timeout_s"])
    fault.at("joined")
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)])
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.05)
    optimizer = make_optimizer(plan["program"], wrapped)
    now = {"step": 0}
    net[3].register_forward_pre_hook(lambda *_: fault.at("forward", now["step"]))
    net[2].weight.register_hook(lambda _: fault.at("backward", now["step"]))
    for step in range(STEPS):
        now["step"] = step
        optimizer.zero_grad()
        loss = wrapped(torch.randn(8, 96)).square().mean()
        fault.at("between", step)
        loss.backward()
        fault.at("step", step)
        optimizer.step()
    fault.at("end")


def make_optimizer(program: str, wrapped: phalanx.DistributedDataParallel) -> torch.optim.Optimizer:
    """What each program is: plain, with a hook, with sharded state, stepped in backward."""
    if program == "hook":
        wrapped.register_comm_hook(None, phalanx.comm.hooks.fp16_compress_hook)
    if program in ("ddp", "hook"):
        return torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    overlapped = program == "overlap"
    return phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1e-3, overlap_with_ddp=overlapped)


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan["launcher"] == "spawn":
        torch.multiprocessing.spawn(train, (plan,), plan["world"])
    else:
        train(int(os.environ["RANK"]), plan)


if __name__ == "__main__":
    main()
