"""One rank's program of an elastic run, as a user would write it, that writes down what it does and suffers a fault.

A record per batch, before it is used: step, generation, rank, world, samples, what they count, a random number that goes
into the loss. What is written last of a step is what was committed. From the records `reference` computes the run again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint.agreement import Agreement
from phalanx.checkpoint.checkpointer import Checkpointer
from phalanx.comm.failure.board import group_timeout_s
from phalanx.comm.group.process_group import PhalanxProcessGroup
from phalanx.comm.shm.transport.rendezvous import Rendezvous
from phalanx.elastic import place
from phalanx.elastic.in_place import InPlace
from phalanx.elastic.journal import Journal
from phalanx.elastic.place import Place
from phalanx.elastic.replay import Replay
from phalanx.elastic.training import Training
from phalanx.elastic.transaction import Transaction
from phalanx.launch.elastic.member import Member
from phalanx.launch.variables import AGENT_PID
from phalanx.launch.worker import Worker
from phalanx.zero.partition import element, shard
from phalanx.zero.partition.local import LocalOptimizer

WIDTH = 24
FAULTS = ("kill", "stop", "raise", "exit", "end", "segv", "memory", "int", "term")


class InjectedError(Exception):
    """What a victim raises."""


@dataclass(frozen=True)
class Plan:
    """What is trained, how, and what goes wrong: `faults` are (what, moment, rank, step)."""

    optimizer: str = "plain"  # zero, overlap, late (overlapped, stepped by step()), stage2, two, inside
    model: str = "plain"  # norm (buffers), low (mixed precision), hook:NAME
    backend: str | None = None
    accumulate: int = 1
    has_loader: bool = True
    has_extra: bool = True
    """Without a loader: whether the place in the data is something extra; else it follows from the number of the step."""
    samples: int = 150
    batch: int = 4
    epochs: int = 2
    timeout_s: float = 20.0
    pause_s: float = 0.003
    compiles: bool = False
    saves: bool = False
    workers: int = 0
    """Processes of the data loader."""
    evaluates: bool = False
    """After each epoch, with a loader that the run does not own."""
    phases: int = 1
    """Calls of `training.epochs`, the last of which is for all epochs."""
    closure: bool = False
    catches: bool = False
    """Whether the program itself catches what backward raises, and steps all the same."""
    around: str = ""  # decay (a learning rate), shrink (parameters): what the program does itself after a step
    wrappers: int = 1
    generations: int = 0
    """Without a loader: train until there have been so many, and count what each leaves behind (`census`)."""
    until: str = ""
    """Without a loader: train until there is this file."""
    faults: tuple[tuple[str, str, int, int], ...] = ()


def make_net(plan: Plan) -> nn.Module:
    """In double precision, so that a step too many or too few is told from rounding."""
    torch.manual_seed(1)
    # Wide enough for several buckets.
    layers: list[nn.Module] = [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)]
    if plan.model == "norm":
        # Of several values per sample, since what is left of an epoch may be one sample per rank.
        layers[1:1] = [nn.Unflatten(1, (WIDTH, 4)), nn.BatchNorm1d(WIDTH), nn.Flatten()]
    net = nn.Sequential(*layers)
    return net if plan.model == "low" else net.double()


def make_data(plan: Plan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    dtype = torch.float32 if plan.model == "low" else torch.float64
    return torch.randn(plan.samples, WIDTH, generator=generator, dtype=dtype)


def checksum(params: list[nn.Parameter]) -> float:
    """Tells a step from the one before."""
    return float(sum(param.detach().double().sum() for param in params))


def loss_of(net: Any, batch: torch.Tensor, noise: float) -> torch.Tensor:
    return ((net(batch) - batch) * (1 + noise)).square().mean()


def make_optimizer(plan: Plan, params: list[nn.Parameter], sharded: bool) -> Any:
    """The optimizers, plain ones for the reference."""
    if plan.optimizer == "two":
        return {"first": torch.optim.Adam(params[:2], lr=3e-3), "second": torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9)}
    if plan.optimizer == "inside" and sharded:
        return phalanx.optim.apply_in_backward(torch.optim.AdamW, params, lr=3e-3)
    if not sharded or plan.optimizer == "plain":
        return torch.optim.AdamW(params, lr=3e-3)
    overlapped = plan.optimizer in ("overlap", "late", "stage2")
    return phalanx.ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        lr=3e-3,
        overlap_with_ddp=overlapped,
        **({"step_in_backward": plan.optimizer == "overlap"} if overlapped else {}),
        stage=2 if plan.optimizer == "stage2" else 1,
    )


def after_step(plan: Plan, optimizer: Any, params: Sequence[torch.Tensor]) -> None:
    """What the program does itself after each step."""
    if plan.around == "decay":
        for group in (optimizer["second"] if isinstance(optimizer, dict) else optimizer).param_groups:
            group["weight_decay"] = group["weight_decay"] + 1e-3
    elif plan.around == "shrink":
        with torch.no_grad():
            for param in params:
                param.mul_(0.99)


def make_scheduler(plan: Plan, optimizer: Any) -> Any:
    if plan.optimizer == "inside":
        return None  # it has an optimizer per parameter
    first = optimizer["first"] if isinstance(optimizer, dict) else optimizer
    return torch.optim.lr_scheduler.StepLR(first, 5, gamma=0.9)


class Position:
    """Where a program without a loader is: how many samples were used."""

    def __init__(self) -> None:
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class Faults:
    """Each happens once in the whole run, to the first worker that is at its rank, step and moment."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self._plan, self._folder = plan, folder
        self.worker: Worker | None = None
        self.training: Training | None = None

    def at(self, moment: str, rank: int | None = None, first: Callable[[], None] | None = None) -> None:
        """`first` is done before the fault."""
        if rank is None:
            rank = -1 if self.worker is None else self.worker.rank
        step = 0 if self.training is None else self.training.step
        for number, (what, when, whose, since) in enumerate(self._plan.faults):
            if when == moment and whose in (rank, -1) and step >= since:
                # The one before has happened: "twice in a row" is an order.
                if number and not os.path.exists(f"{self._folder}/fault-{number - 1}"):
                    continue
                with contextlib.suppress(FileExistsError):
                    descriptor = os.open(f"{self._folder}/fault-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                    os.write(descriptor, json.dumps([time.monotonic(), os.getpid()]).encode())
                    os.close(descriptor)
                    if first is not None:
                        first()
                    happen(what)


def happen(what: str) -> None:
    """The fault itself."""
    if what == "raise":
        raise InjectedError("the injected words")
    if what == "exit":
        sys.exit(3)
    if what == "end":
        os._exit(4)
    if what == "host":
        os.kill(int(os.environ[AGENT_PID]), signal.SIGKILL)  # the launcher, and with it all workers of this host
        time.sleep(60)
    if what == "cut":
        # The host is off the network, without a word to anybody; its processes live on.
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        return
    if what == "memory":
        raise MemoryError("the injected words")
    if what == "segv":
        ctypes.string_at(0)
    names = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "int": signal.SIGINT, "term": signal.SIGTERM}
    signal.raise_signal(names[what])


def _around(owner: Any, name: str, faults: Faults, before: str, after: str, harm: Callable[..., None] | None = None) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        faults.at(before, first=None if harm is None else lambda: harm(*args, **kwargs))
        result = real(*args, **kwargs)
        faults.at(after)
        return result

    setattr(owner, name, call)


def _arm(faults: Faults) -> None:
    """Moments that are inside of phalanx."""
    for owner, name, moment in (
        (Checkpointer, "save", "save"),
        (Agreement, "exchange", "agree"),
        (PhalanxProcessGroup, "__init__", "group"),
        (Rendezvous, "meet", "links"),
        (Transaction, "write", "write"),
        (Transaction, "read", "read"),
        (Transaction, "keep", "keep"),
        (Transaction, "give", "give"),
        (Member, "meet", "meet"),
        (Worker, "rejoin", "rejoin"),
        (Worker, "part", "part"),
        (Worker, "barrier", "barrier"),
        (Training, "_renew", "renew"),
        (InPlace, "settle", "settle"),
        (Place, "begin", "vote"),
        (Place, "end", "take"),
        (Journal, "begin", "mark"),
        (Journal, "protect", "protect"),
        (Journal, "done", "done"),
        (Replay, "run", "replay"),
    ):
        _around(owner, name, faults, f"{moment}<", f"{moment}>")
    _around(LocalOptimizer, "step_some", faults, "torn", "piece>", _tear)


def _tear(local: LocalOptimizer, active: Mapping[int, Sequence[torch.Tensor]], **_: Any) -> None:
    """What a step that was cut short may leave of the piece that it was at."""
    with torch.no_grad():
        for tensor in (tensor for tensors in active.values() for tensor in tensors):
            for torn in (tensor, *local.optim.state.get(tensor, {}).values()):
                torn.fill_(7)


def _cut_small() -> None:
    """Several buckets, slices and pieces of a model that is small."""
    element.CAP_BYTES, shard.CPU_SLICE_NUMEL, place.MOST_NUMEL = 16 * 1024, 256, 400


def train(plan: Plan, folder: str, number: int) -> None:
    """The program."""
    faults = Faults(plan, folder)
    _cut_small()
    if plan.faults:
        _arm(faults)
        faults.at("start", number)
    worker = faults.worker = phalanx.init(plan.backend, timeout_s=plan.timeout_s)
    faults.at("joined")
    record = os.open(f"{folder}/records-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    precision = phalanx.MixedPrecision(torch.bfloat16, torch.bfloat16) if plan.model == "low" else None
    net: Any = make_net(plan)
    halves = [net] if plan.wrappers == 1 else [net[:2], net[2:]]
    models = [phalanx.DistributedDataParallel(half, bucket_cap_mb=0.01, mixed_precision=precision) for half in halves]
    model = models[0]
    if plan.model.startswith("hook:"):
        _register(model, plan.model.removeprefix("hook:"))
    faults.at("wrapped")
    params = list(net.parameters())
    called: Any = torch.compile(model, backend="phalanx") if plan.compiles else model
    given = called if plan.wrappers == 1 else nn.ModuleDict({str(number): one for number, one in enumerate(models)})
    called = called if plan.wrappers == 1 else nn.Sequential(*models)
    optimizer = make_optimizer(plan, params, True)
    scheduler = make_scheduler(plan, optimizer)
    data = make_data(plan)
    params[0].register_hook(lambda _: faults.at("backward"))
    torch.manual_seed(100 + number)

    loader = worker.loader(_dataloader(plan, data), model) if plan.has_loader else None
    seen = worker.loader(_dataloader(plan, data)) if plan.evaluates else None
    position = Position()
    checkpointer = Checkpointer(f"{folder}/saved", called, optimizer, scheduler, loader) if plan.saves else None
    faults.at("ready")

    extra = {"position": position} if plan.has_extra and not plan.has_loader else None
    on_event = _census_taker(f"{folder}/census-{number}") if plan.generations else None

    @phalanx.elastic.run(given, optimizer, scheduler, loader, extra, on_event=on_event)
    def steps(training: Training) -> None:
        faults.training = training
        world = dist.group.WORLD
        assert world is not None and (worker.world == 1 or group_timeout_s(world) == plan.timeout_s)
        micro = 0
        for batch, ids, count in _batches(plan, faults, worker, (loader, seen), position, data):
            noise = float(torch.rand(()))
            formed = worker.member.formed.generation if worker.member and worker.member.formed else 0
            note = {"step": training.step + 1, "generation": formed, "rank": worker.rank, "world": worker.world}
            note |= {"micro": micro, "worker": number, "ids": ids, "count": count, "noise": noise}
            note |= {"epoch": loader.epoch if loader else 0, "at": time.monotonic()}
            note |= {"before": checksum(params)}
            os.write(record, json.dumps(note).encode() + b"\n")
            faults.at("batch")
            is_last = micro + 1 == plan.accumulate

            def compute() -> torch.Tensor:
                with contextlib.ExitStack() as stack:
                    for one in () if is_last else models:  # noqa: B023
                        stack.enter_context(one.no_sync())
                    loss = loss_of(called, batch, noise) / plan.accumulate  # noqa: B023
                    faults.at("forward")
                    with contextlib.suppress(Exception) if plan.catches else contextlib.nullcontext():
                        loss.backward()
                faults.at("reduced")
                return loss

            if not plan.closure:
                compute()
            if is_last:
                for one in _steppers(plan, optimizer):
                    one.step(*[compute] * plan.closure)
                    faults.at("stepped")
                    one.zero_grad()
                after_step(plan, optimizer, params)
                if scheduler is not None:
                    scheduler.step()
                if checkpointer is not None and (training.step + 1) % 5 == 0:
                    checkpointer.save(training.step + 1)
            micro = (micro + 1) % plan.accumulate
            time.sleep(plan.pause_s)

    steps()
    faults.at("over")
    assert faults.training is not None
    state = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in net.state_dict().items()}
    rates = None if scheduler is None else scheduler.get_last_lr()
    result = {"step": faults.training.step, "digests": state, "rank": worker.rank, "lr": rates}
    torch.save(net.state_dict(), f"{folder}/model-{number}")
    with open(f"{folder}/result-{number}", "w") as file:
        json.dump(result, file)


def census() -> dict[str, int]:
    """What this process holds of the system."""
    gc.collect()
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as memory:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "maps": len(maps.readlines()),
            "pages": int(memory.read().split()[1]),
            "shm": len(os.listdir("/dev/shm")),
            "groups": len(dist.distributed_c10d._world.pg_map),
        }


def _census_taker(path: str) -> Callable[[phalanx.elastic.Event], None]:
    def take(event: phalanx.elastic.Event) -> None:
        if event.what == "formed":
            with open(path, "a") as file:
                file.write(json.dumps({"generation": event.generation, "world": event.world, **census()}) + "\n")

    return take


def _steppers(plan: Plan, optimizer: Any) -> list[Any]:
    if plan.optimizer == "inside":
        return []
    return list(optimizer.values()) if isinstance(optimizer, dict) else [optimizer]


def _dataloader(plan: Plan, data: torch.Tensor) -> DataLoader[Any]:
    dataset = TensorDataset(data, torch.arange(plan.samples))
    return DataLoader(dataset, batch_size=plan.batch, shuffle=True, num_workers=plan.workers)


def _batches(
    plan: Plan, faults: Faults, worker: Worker, loaders: Any, position: Position, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, list[int], float]]:
    training, (loader, seen) = faults.training, loaders
    assert training is not None
    for count in range(plan.epochs - plan.phases + 1, plan.epochs + 1) if loader is not None else ():
        for _ in training.epochs(count):
            for batch, ids in loader:
                yield batch, ids.tolist(), loader.count
            faults.at("epoch")
            if seen is not None:
                # As many on all ranks together as there are samples, whoever has come or gone.
                assert sum(worker.gather([len(ids) for _, ids in seen])) == plan.samples
    if loader is not None:
        return
    if not plan.has_extra:
        position.used = training.step * 3 * plan.batch  # not as a step left it that never was
    while position.used < plan.samples or plan.generations or _waits_for(plan.until, worker):
        assert worker.member is not None and worker.member.formed is not None
        if 0 < plan.generations <= worker.member.formed.generation:
            return
        if not plan.has_extra:
            position.used = training.step * 3 * plan.batch
            if position.used >= plan.samples:
                return
        # What is left over of the world's batches goes to rank 0 alone, with what the others have already.
        start = position.used + worker.rank * plan.batch
        ids = [number % plan.samples for number in range(start, start + plan.batch)]
        yield data[ids], ids, float(plan.batch)
        position.used += worker.world * plan.batch
        training.commit()


def _waits_for(file: str, worker: Worker) -> bool:
    """As rank 0 sees it: all end at the same step."""
    return bool(file) and not worker.exchange.from_first(os.path.exists(file))


def _register(model: Any, name: str) -> None:
    hooks = phalanx.comm.hooks
    if name == "powersgd":
        state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, hooks.powerSGD_hook)
    elif name == "half":
        model.register_comm_hook(None, hooks.fp16_compress_hook)
    else:
        model.register_comm_hook(hooks.Int8State(), hooks.int8_hook)


def as_json(plan: Plan) -> str:
    return json.dumps(asdict(plan))
