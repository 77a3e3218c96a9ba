"""How processes end: ranks that train a little and end in some way, by the interpreter's own way out.

Run as a script: `python -m tests.comm.failure.ends '{"kind": "raise", ...}' ...`, one plan per argument; prints a line of
JSON for each. Ranks are forked from a process that has imported torch and has no threads, and leave through Python's
finalization as a user's script does, which is where a process with gloo threads may abort.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from tests.cluster.asides import take_names_from_files
from tests.cluster.command import keep_warm

LIMIT_S = 120


class InjectedError(Exception):
    """What a rank raises."""


@dataclass(frozen=True)
class Plan:
    """`kind`: "clean", "raise" (between two steps), "hook" (the same, with `sys.excepthook` not ours any more), "backward"
    (amid one), "kill" (amid one), "exit" (with code 3, after a failed backward of another rank). `starter`: "fork", or
    "process" for a child of multiprocessing. `overlapped`: the optimizer steps in backward."""

    kind: str
    backend: str
    victim: int = 2
    world: int = 3
    starter: str = "fork"
    overlapped: bool = False


def train(rank: int, plan: Plan) -> None:
    """One rank's program."""
    phalanx.init(backend=plan.backend, timeout_s=60)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    # Many buckets, so that some are under way whenever something happens.
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.03)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(wrapped.parameters())
    if plan.overlapped:
        optimizer = phalanx.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    torch.manual_seed(1 + wrapped.collectives.rank)
    for _ in range(3):
        wrapped(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if plan.kind == "clean":
        _go_on_at_the_end()
        return
    if rank == plan.victim:
        _suffer(plan.kind, net)
    try:
        wrapped(torch.randn(4, 64)).square().mean().backward()
    except phalanx.errors.PeerFailure:
        if plan.kind == "exit":
            sys.exit(3)
        raise


def _go_on_at_the_end() -> None:
    """The main thread ends; another, and after it an exit function, still use the group, as Python lets them."""

    def together() -> None:
        time.sleep(0.02)
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        dist.all_reduce(torch.ones(5))

    atexit.register(together)
    threading.Thread(target=together).start()


def _suffer(kind: str, net: nn.Module) -> None:
    if kind == "hook":
        sys.excepthook = lambda *_: None  # as rich's, which does not call the one before it
    if kind in ("raise", "hook", "exit"):
        raise InjectedError("the victim's own words")

    def fault(_: torch.Tensor) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("the victim's own words")

    net[4].weight.register_hook(fault)


def _environment(rank: int, plan: Plan, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.world, "LOCAL_WORLD_SIZE": plan.world}
    return {**{name: str(value) for name, value in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _begin(rank: int, plan: Plan, port: int, stderr: Any) -> None:
    os.dup2(stderr.fileno(), 2)
    os.environ.update(_environment(rank, plan, port))
    signal.alarm(LIMIT_S)
    train(rank, plan)


def run(plan: Plan) -> dict[str, Any]:
    """Start the ranks, wait for all; exit codes, what each said on stderr, and how long the last one took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [tempfile.TemporaryFile("w+") for _ in range(plan.world)]
    started = time.monotonic()
    if plan.starter == "process":
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_begin, args=(r, plan, port, files[r])) for r in range(plan.world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
    else:
        codes = _fork(plan, port, files)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
        file.close()
    return {"plan": asdict(plan), "codes": codes, "stderr": texts, "seconds": time.monotonic() - started}


def _fork(plan: Plan, port: int, files: list[Any]) -> list[int]:
    pids = []
    for rank in range(plan.world):
        pid = os.fork()
        if pid == 0:
            _begin(rank, plan, port, files[rank])
            sys.exit(0)  # out of this module, through the interpreter's end
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main(arguments: list[str]) -> None:
    """Run the plans one after the other."""
    # Imports that would cost each rank a second. Not above: the pytest process, which imports this module, needs none of it.
    keep_warm()
    take_names_from_files()
    for argument in arguments:
        outcome = run(Plan(**json.loads(argument)))
        # Straight to the descriptor: a forked rank must not have our buffer to flush.
        os.write(1, (json.dumps(outcome) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
