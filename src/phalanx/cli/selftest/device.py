"""What each worker of `phalanx doctor`'s second self-test does: train on a device of its own, in every way of reducing.

After each way the parameters are compared with those of one process that trained on all the data, and with rank 0's. Where
the kind of device can tell (CUDA), a steady step in which the host waits for the device is an error, by torch's own watch.
Rank 0 prints one JSON line with what it found. Run as a module by `phalanx run`'s machinery.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm import hooks
from phalanx.ddp import DistributedDataParallel
from phalanx.launch.worker import init
from phalanx.zero import ZeroRedundancyOptimizer

_NUM_STEPS = 8
_WARM_STEPS = 3  # the first settles the plan; then state is made and memory taken
_BATCH = 8
_WIDTH = 512  # a gradient of a megabyte: beyond every threshold in the package
_RATE = 0.05


@dataclass(frozen=True)
class Way:
    """One way of training. `tolerance`: by how much parameters may differ from those of one process."""

    name: str
    tolerance: float = 1e-5  # sums in another order, over a few steps
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    zero: dict[str, Any] | None = None
    is_weighted: bool = False
    accumulates: bool = False


WAYS = (
    Way("plain"),
    Way("static graph, views", options={"static_graph": True, "gradient_as_bucket_view": True}),
    Way("no_sync", accumulates=True),
    Way("weights", is_weighted=True),
    Way("late mismatch poisons", options={"on_late_mismatch": "poison"}),
    # Gradients of ten significant bits, here and in no process alone.
    Way("fp16 hook", 1e-3, hook=hooks.fp16_compress_hook),
    Way("ZeRO", zero={}),
    Way("ZeRO overlapped", zero={"overlap_with_ddp": True}),
    Way("ZeRO overlapped, stage 2", zero={"overlap_with_ddp": True, "stage": 2}),
)


@dataclass(frozen=True)
class Place:
    """Where this worker trains. `alike`: all ranks are known to have this one's data, as where one stands for all."""

    rank: int
    world: int
    device: torch.device
    alike: bool = False

    def parts(self, step: int) -> list[torch.Tensor]:
        """Every rank's batch of a step."""
        generator = torch.Generator().manual_seed(step)
        ranks = [0] * self.world if self.alike else range(self.world)
        drawn = [torch.randn(_BATCH, 16, generator=generator) for _ in range(self.world)]
        return [drawn[rank].to(self.device) for rank in ranks]

    def weights(self, way: Way) -> list[float]:
        """Every rank's share in the mean, as its user would give it."""
        return [1.0 + (0 if self.alike or not way.is_weighted else rank) for rank in range(self.world)]


def main() -> None:
    """Raise on anything that is not as it should be."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise RuntimeError("there is no device that torch can use. Run this where there are two.")
    with init(device=accelerator.type, timeout_s=60) as worker:
        place = Place(worker.rank, worker.world, worker.device)
        begun = time.perf_counter()
        found = {way.name: train(way, place) for way in WAYS}
        if worker.is_first:
            about = {"device": str(worker.device), "backend": worker.backend, "world": worker.world}
            about["watched"] = _can_tell(worker.device)
            print(json.dumps({**about, "seconds": time.perf_counter() - begun, "differences": found}))


def train(way: Way, place: Place) -> float:
    """Train in this way; returns the largest difference from one process. Raises if it is too large, or ranks differ."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(_model().to(place.device), bucket_cap_mb=0.5, **way.options)
    alone = copy.deepcopy(ddp.module)  # after wrapping: rank 0's parameters are everybody's by then
    if way.hook is not None:
        ddp.register_comm_hook(None, way.hook)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=_RATE, momentum=0.9)
    if way.zero is not None:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=_RATE, momentum=0.9, **way.zero)
    batches = [place.parts(step) for step in range(_NUM_STEPS)]
    for step, parts in enumerate(batches):
        with _watched(place.device) if step >= _WARM_STEPS else contextlib.nullcontext():
            _step(way, place, ddp, optimizer, parts[place.rank])
    ddp.verify()
    _train_alone(alone, batches, place.weights(way))
    return _compare(way, place, ddp.module, alone)


def _step(way: Way, place: Place, ddp: DistributedDataParallel, optimizer: Any, mine: torch.Tensor) -> None:
    halves = mine.chunk(2) if way.accumulates else (mine,)
    with ddp.weight(place.weights(way)[place.rank]) if way.is_weighted else contextlib.nullcontext():
        for number, half in enumerate(halves):
            with ddp.no_sync() if number < len(halves) - 1 else contextlib.nullcontext():
                (ddp(half).square().mean() / len(halves)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_alone(model: nn.Module, batches: list[list[torch.Tensor]], weights: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    for parts in batches:
        optimizer.zero_grad()
        for part, weight in zip(parts, weights, strict=True):
            (model(part).square().mean() * (weight / sum(weights))).backward()
        optimizer.step()


def _compare(way: Way, place: Place, trained: nn.Module, alone: nn.Module) -> float:
    largest = 0.0
    for (name, param), expected in zip(trained.named_parameters(), alone.parameters(), strict=True):
        differs = float((param.detach() - expected.detach()).abs().max())
        if not differs <= way.tolerance:  # NaN too
            raise RuntimeError(
                f"rank {place.rank}: {way.name}: parameter '{name}' differs by {differs:g} from that of one process, "
                f"expected at most {way.tolerance:g}"
            )
        largest = max(largest, differs)
        first = param.detach().clone()
        dist.broadcast(first, 0)
        if not (place.alike or torch.equal(param.detach(), first)):
            raise RuntimeError(f"rank {place.rank}: {way.name}: parameter '{name}' differs from rank 0's")
    return largest


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 4))


def _can_tell(device: torch.device) -> bool:
    """Whether torch notices that the host waits for this kind of device."""
    return hasattr(torch.get_device_module(device), "set_sync_debug_mode")


@contextlib.contextmanager
def _watched(device: torch.device) -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises, where torch can tell."""
    if not _can_tell(device):
        yield
        return
    module: Any = torch.get_device_module(device)
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


if __name__ == "__main__":
    main()
