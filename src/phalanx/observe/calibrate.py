"""Measuring what `predict` needs: a model's compute, when its gradients come, and how fast data moves here.

A target names a function that builds the model: `package.module:function` or `file.py:function`. It returns the
model, or the model and a function that, given the model (wrapped), computes a loss. The measurement runs in real
ranks at once, so that what they take from each other is in it; each trains in a world of its own, so that
DistributedDataParallel's own work is in it and communication is not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.collectives import Collectives
from phalanx.comm.torch_backend import collectives_for
from phalanx.ddp import DistributedDataParallel
from phalanx.errors import CommunicationError, ConfigError
from phalanx.launch.agent import LaunchSettings, launch
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.worker import Worker, init, threads_for
from phalanx.observe import trace
from phalanx.observe.predict import Calibration

MOST_RANKS = 4
"""More are not started for a calibration; larger worlds are computed from it."""

_SIZES = (4_096, 65_536, 524_288, 4_194_304, 26_214_400)
# The first steps of a wrapped model settle its plan.
_WARMUP, _STEPS = 12, 9

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """A model, and its loss when the target offers one."""

    model: nn.Module
    loss: Loss | None


def resolve(target: str) -> Target:
    """Import and call a target's function. Every mistake in it is a ConfigError."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(
            f"{target!r} names no model. Give module:function or file.py:function, where the function returns "
            "a model, or a model and a function that computes the loss of a model."
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{place} has no function {name!r}")
    try:
        built = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{target} failed: {type(error).__name__}: {error}") from error
    model, loss = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise ConfigError(
            f"{target} returned {type(built).__name__}, not a model, nor a model and a function for its loss"
        )
    return Target(model, loss)


def _import_module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


def optimizer_state_bytes(parameters: Iterable[nn.Parameter], optimizer_class: type[torch.optim.Optimizer]) -> int:
    """What the optimizer will hold after its first step, found by a step on tensors without memory."""
    shadows = []
    for parameter in parameters:
        if parameter.requires_grad:
            shadow = nn.Parameter(torch.empty_like(parameter, device="meta"))
            shadow.grad = torch.empty_like(shadow)
            shadows.append(shadow)
    try:
        optimizer = optimizer_class(shadows)  # type: ignore[call-arg]  # every torch optimizer has defaults
        optimizer.step()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the state of {optimizer_class.__name__} cannot be predicted ({error}). "
            "Choose one that works element by element, such as AdamW or SGD."
        ) from error
    held = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))


def calibrate(target: str, world: int, optimizer: str, backend: str | None = None) -> Calibration:
    """Measure on `world` ranks, or on `MOST_RANKS` where it is larger."""
    nproc = min(world, MOST_RANKS)
    with tempfile.TemporaryDirectory(prefix="phalanx-plan-") as folder:
        arguments = json.dumps({"target": target, "optimizer": optimizer, "backend": backend, "folder": folder})
        settings = LaunchSettings(("--module", "phalanx.observe.calibrate", arguments), nproc)
        outcome = launch(settings, RunDirectory(folder), lambda rank, stream, line: None)
        if outcome.failure is not None:
            raise CommunicationError(
                f"the calibration failed on rank {outcome.failure.first.rank}: {outcome.failure.first.message}",
                [outcome.failure.first.rank],
            )
        if outcome.signal is not None:
            raise KeyboardInterrupt
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(nproc)]
    slowest = max(found, key=lambda value: value["backward_s"])
    return Calibration.from_json(slowest)


class _Compute:
    """Times forward, backward and step, and notes when each parameter's gradient came."""

    def __init__(self, target: Target, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert target.loss is not None, "checked by the caller"
        self._loss, self._wrapped, self._optimizer = target.loss, wrapped, optimizer
        parameters = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
        self._arrived: dict[int, int] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index))
            for index, parameter in enumerate(parameters)
        ]
        self.count = len(parameters)
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.steps: list[int] = []
        self.ready: list[list[float]] = []
        self.spans: list[tuple[int, int]] = []

    def _note(self, index: int) -> None:
        self._arrived[index] = trace.now_ns()

    def close(self) -> None:
        """Leave the model as it was found: no hooks, and nobody who holds its group."""
        for hook in self._hooks:
            hook.remove()
        del self._wrapped, self._optimizer

    def once(self, keep: bool = True) -> None:
        """One step."""
        self._arrived.clear()
        began = trace.now_ns()
        loss = self._loss(self._wrapped)
        forwarded = trace.now_ns()
        loss.backward()
        ended = trace.now_ns()
        self._optimizer.step()
        self._optimizer.zero_grad()
        stepped = trace.now_ns()
        if keep:
            self.forwards.append(forwarded - began)
            self.backwards.append(ended - forwarded)
            self.steps.append(stepped - ended)
            self.spans.append((began, stepped))
            length = max(1, ended - forwarded)
            whole = [(self._arrived.get(index, ended) - forwarded) / length for index in range(self.count)]
            self.ready.append(whole)


def measure(worker: Worker, target: Target, optimizer_class: type[torch.optim.Optimizer]) -> Calibration:
    """On every rank of a fresh world. The target's model has been trained a little afterwards."""
    groups = [dist.new_group([rank]) for rank in range(worker.world)]
    wrapped = DistributedDataParallel(target.model, process_group=groups[worker.rank])
    compute = _Compute(target, wrapped, optimizer_class(target.model.parameters()))  # type: ignore[call-arg]
    try:
        return _measure(worker, compute)
    finally:
        compute.close()
        dist.destroy_process_group(groups[worker.rank])


def _measure(worker: Worker, compute: _Compute) -> Calibration:
    for number in range(_WARMUP + _STEPS):
        dist.barrier()
        compute.once(keep=number >= _WARMUP)
    transfers = tuple((size, _transfer_s(size)) for size in _SIZES) if worker.world > 1 else ((1, 0.0),)
    second = 1e9 / _stretch(compute, worker.world)
    return Calibration(
        world=worker.world,
        cores=threads_for(1),
        backend=worker.backend,
        forward_s=statistics.median(compute.forwards) / second,
        backward_s=statistics.median(compute.backwards) / second,
        optimizer_s=statistics.median(compute.steps) / second,
        ready=tuple(map(statistics.median, zip(*compute.ready, strict=True))),
        transfers=transfers,
        overlap=_overlap(compute, transfers) if worker.world > 1 else 1.0,
    )


def _stretch(compute: _Compute, world: int) -> float:
    """How much longer a step takes until the last rank has ended it than it takes one rank.

    Ranks that outnumber the cores run in turns: each is quick when its turn comes. All are of this host
    and read one clock.
    """
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, compute.spans)
    whole = [max(end for _, end in spans) - min(start for start, _ in spans) for spans in zip(*by_rank, strict=True)]
    mine = [end - start for start, end in compute.spans]
    stretch: float = statistics.median(whole) / statistics.median(mine)
    return max(1.0, stretch)


def _collectives() -> Collectives:
    group = dist.group.WORLD
    assert group is not None, "measured only inside a world"
    return collectives_for(group)


def _transfer_s(num_bytes: int) -> float:
    collectives = _collectives()
    tensor = collectives.allocate(num_bytes // 4, torch.float32, torch.device("cpu"))
    best = []
    for _ in range(7):
        dist.barrier()
        started = time.perf_counter()
        collectives.all_reduce(tensor).wait()
        best.append(time.perf_counter() - started)
    return statistics.median(best)


def _overlap(compute: _Compute, transfers: tuple[tuple[int, float], ...]) -> float:
    """How much of a collective's time compute does not pay for, when both go on at once."""
    collectives = _collectives()
    size, alone = transfers[-2]
    whole = statistics.median(compute.forwards) + statistics.median(compute.backwards)
    whole = (whole + statistics.median(compute.steps)) / 1e9
    wanted = torch.tensor([max(1, round(0.3 * whole / alone))])
    dist.broadcast(wanted, 0)  # ranks measured slightly different times, and must move the same
    count = int(wanted.item())
    tensors = [collectives.allocate(size // 4, torch.float32, torch.device("cpu")) for _ in range(count)]
    both = []
    for _ in range(5):
        dist.barrier()
        started = time.perf_counter()
        works = [collectives.all_reduce(tensor) for tensor in tensors]
        compute.once(keep=False)
        for work in works:
            work.wait()
        both.append(time.perf_counter() - started)
    moved = count * alone
    return min(1.0, max(0.0, (whole + moved - statistics.median(both)) / min(moved, whole)))


def main(arguments: str) -> None:
    """One rank of a calibration."""
    given = json.loads(arguments)
    with init(given["backend"]) as worker:
        torch.manual_seed(0)
        target = resolve(given["target"])
        found = measure(worker, target, getattr(torch.optim, given["optimizer"]))
        (Path(given["folder"]) / f"{worker.rank}.json").write_text(json.dumps(found.to_json()))


if __name__ == "__main__":
    main(sys.argv[1])
