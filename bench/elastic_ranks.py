"""What each process of `bench.elastic` runs: the same model under each system, and a line in a file per completed step.

    python -m bench.elastic_ranks SIDE CASE LOG

A line says when (of the host's monotonic clock), who, which step and how many ranks made it. The processes train until they
are ended. Only what a side needs is imported: torchft is in an environment of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.measure import interleave
from bench.models import CASES, SIZES, Case

OURS, SHARDED, TORCHFT, TORCHRUN = "ours", "sharded", "torchft", "torchrun"
OVERHEAD, OVERHEAD_SHARDED = "cost", "cost-sharded"
OVERHEAD_COPIES, OVERHEAD_PLAIN_COPIES = "cost-copies", "cost-plain-copies"
WORLD = 3
FEWEST = 2
_SAVES_EVERY = 10
_STEPS_A_BLOCK = 1  # steps alternate: what the machine does meanwhile changes within a second


class Log:
    """The file of completed steps; every process appends whole lines."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def done(self, step: int, world: int) -> None:
        line = {"at": time.monotonic(), "pid": os.getpid(), "step": step, "world": world}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def training(case: Case, model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """One step on data of this process's own."""
    first = torch.initial_seed() % 1000
    batches = itertools.cycle([case.batch(torch.Generator().manual_seed(first + number)) for number in range(4)])

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model, next(batches)).backward()
        optimizer.step()

    return step


def _wrapped(case: Case, sharded: bool) -> tuple[nn.Module, Any]:
    import phalanx

    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(case.build())
    if sharded:
        return model, phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def ours(case: Case, log: Log, sharded: bool) -> None:
    """Under `phalanx run --elastic`."""
    import phalanx

    worker = phalanx.init(device="cpu")
    model, optimizer = _wrapped(case, sharded)
    step = training(case, model, optimizer)

    @phalanx.elastic.run(model, optimizer)
    def train(run: phalanx.elastic.Training) -> None:
        while True:
            step()
            world = worker.world  # who made it; the commit may let others in
            run.commit()
            log.done(run.step, world)

    train()


def torchft(case: Case, log: Log) -> None:
    """One replica, with the lighthouse of the environment; its defaults except for how few may go on.

    Its pure wrapper: with the other one, which it recommends, the survivors of a death end (torchft 0.2.0, torch 2.13): its
    hook asserts that there is a future of a collective that has just failed.
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    torch.manual_seed(0)
    net = case.build()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    def load(given: dict[str, Any]) -> None:
        net.load_state_dict(given["model"])
        inner.load_state_dict(given["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=FEWEST,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id="replica_0",
        hostname="127.0.0.1",
    )
    step = training(case, PureDistributedDataParallel(manager, net), Optimizer(manager, inner))
    while True:
        before = manager.current_step()
        step()
        if manager.current_step() > before:
            log.done(manager.current_step(), manager.num_participants())


def torchrun(case: Case, log: Log, folder: str) -> None:
    """Torch's own classes; after a failure all start again from what rank 0 has saved."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = case.build()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saved, done = Path(folder) / "torchrun.pt", 0
    if saved.exists():
        given = torch.load(saved, weights_only=True)
        net.load_state_dict(given["model"])
        optimizer.load_state_dict(given["optimizer"])
        done = given["step"]
    step = training(case, model, optimizer)
    for number in itertools.count(done + 1):
        step()
        log.done(number, dist.get_world_size())
        if number % _SAVES_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, f"{saved}.new")
            Path(f"{saved}.new").replace(saved)


class Metric:
    """Something extra."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def overhead(case: Case, log: str, side: str, num_rounds: int) -> None:
    """Steps with and without a commit, in turns, in the same processes of an elastic run.

    Both sides have a loader, which is what commits a step. With something extra copies are written after it.
    """
    import phalanx

    worker = phalanx.init(device="cpu")
    sharded = side in (OVERHEAD_SHARDED, OVERHEAD_COPIES)
    # What has a state of its own has copies written; a generator would not.
    extra = {"metric": Metric()} if side in (OVERHEAD_COPIES, OVERHEAD_PLAIN_COPIES) else None
    kept, plain = _wrapped(case, sharded), _wrapped(case, sharded)
    # Each rank its own data, as in training; the loader only counts.
    torch.manual_seed(worker.rank)
    steps = {"elastic": training(case, *kept), "plain": training(case, *plain)}
    numbers = TensorDataset(torch.arange(10**6))
    loaders = [worker.loader(DataLoader(numbers, batch_size=1)) for _ in range(2)]

    @phalanx.elastic.run(*kept, loader=loaders[0], extra=extra)
    def train(run: phalanx.elastic.Training) -> None:
        batches = [iter(loader) for loader in loaders]

        def committed() -> None:
            next(batches[0])
            steps["elastic"]()

        def simple() -> None:
            next(batches[1])
            steps["plain"]()

        found = interleave({"elastic": committed, "plain": simple}, num_rounds, _STEPS_A_BLOCK, worker.barrier)
        Path(f"{log}.{worker.rank}").write_text(json.dumps({name: samples.ms for name, samples in found.items()}))

    train()


def main(side: str, case: str, log: str, *given: str) -> None:
    torch.set_num_threads(1)
    chosen = (CASES | SIZES)[case]
    if side in (OVERHEAD, OVERHEAD_SHARDED, OVERHEAD_COPIES, OVERHEAD_PLAIN_COPIES):
        overhead(chosen, log, side, int(given[0]))
    elif side == TORCHFT:
        torchft(chosen, Log(log))
    elif side == TORCHRUN:
        torchrun(chosen, Log(log), *given)
    else:
        ours(chosen, Log(log), side == SHARDED)


if __name__ == "__main__":
    main(*sys.argv[1:])
