"""A user's program, run whole under a launcher, in which one rank suffers a fault at a chosen moment.

    python program.py '{"program": "zero", "backend": "gloo", "fault": "raise", "moment": "backward", "victim": 1, ...}'

Written as a user would write it: nothing is caught, nothing is cleaned up. With `"launcher": "spawn"` it starts its ranks
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
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
        happen(self._plan["fault"])


def happen(fault: str) -> None:
    """The fault itself; "deaf" is none for the others."""
    if fault == "raise":
        raise InjectedError(WORDS)
    if fault == "memory":
        raise MemoryError(WORDS)
    if fault == "exit":
        sys.exit(7)
    if fault == "leave":
        sys.exit(0)
    if fault == "end":
        os._exit(0)
    if fault == "segv":
        ctypes.string_at(0)
    if fault == "deaf":
        os.close(1)
        return
    names = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "hup": signal.SIGHUP}
    os.kill(os.getpid(), names[fault])


def train(rank: int, plan: dict[str, Any]) -> None:
    """One rank's program."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(plan["world"]))
    fault = Fault(plan, int(os.environ["RANK"]))
    fault.at("start")
    phalanx.init(backend=plan["backend"], timeout_s=plan["timeout_s"])
    fault.at("joined")
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(96, 96) for _ in range(6)]
    net = nn.Sequential(*layers, *([nn.BatchNorm1d(96)] if plan["program"] == "buffers" else []))
    precision = phalanx.MixedPrecision(param_dtype=torch.bfloat16) if plan["program"] == "mixed" else None
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.05, mixed_precision=precision)
    optimizer = make_optimizer(plan["program"], wrapped)
    now = {"step": 0}
    net[3].register_forward_pre_hook(lambda *_: fault.at("forward", now["step"]))
    net[2].weight.register_hook(lambda _: fault.at("backward", now["step"]))
    uneven = wrapped.join() if plan["program"] == "join" else contextlib.nullcontext()
    saves = phalanx.Checkpointer(plan["note"] + "-saves", wrapped, optimizer) if plan["program"] == "saves" else None
    with uneven, saves or contextlib.nullcontext():
        for step in range(STEPS + (int(os.environ["RANK"]) if plan["program"] == "join" else 0)):
            now["step"] = step
            optimizer.zero_grad()
            loss = wrapped(torch.randn(8, 96)).square().mean()
            fault.at("between", step)
            loss.backward()
            fault.at("step", step)
            optimizer.step()
            if saves is not None:
                saves.save(step)
    fault.at("end")


def make_optimizer(program: str, wrapped: phalanx.DistributedDataParallel) -> torch.optim.Optimizer:
    """What each program is: plain, with a hook, with sharded state, stepped in backward."""
    hooks = phalanx.comm.hooks
    if program == "hook":
        wrapped.register_comm_hook(None, hooks.fp16_compress_hook)
    if program == "powersgd":
        wrapped.register_comm_hook(hooks.PowerSGDState(None, start_powerSGD_iter=2), hooks.powerSGD_hook)
    options: dict[str, dict[str, Any]] = {
        "zero": {},
        "overlap": {"overlap_with_ddp": True},
        "stage2": {"overlap_with_ddp": True, "stage": 2},
        "shared": {"shared_parameters": True},
    }
    if program not in options:
        return torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    return phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1e-3, **options[program])


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan["launcher"] == "spawn":
        torch.multiprocessing.spawn(train, (plan,), plan["world"])
    else:
        train(int(os.environ["RANK"]), plan)


if __name__ == "__main__":
    main()
