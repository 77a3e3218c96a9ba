"""A small model that learns, through deaths drawn at random: what it has learnt in the end.

    python -m tests.elastic.learning FOLDER < settings as JSON

Each death happens once in the run: the rank that is at its step kills itself a drawn time later, wherever it is then.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.elastic import Event
from phalanx.launch.elastic.membership import Limits
from tests.elastic.cases import warm
from tests.elastic.host import Host

WORLD, EPOCHS, SAMPLES, BATCH = 3, 10, 1920, 48
STEPS = EPOCHS * SAMPLES // BATCH
"""With as many samples per step all along."""


@dataclass(frozen=True)
class Settings:
    """`keeps_batch`: the global batch stays what it is; else each rank's does."""

    num_deaths: int
    seed: int = 0
    keeps_batch: bool = True
    sharded: bool = False


def deaths(settings: Settings) -> list[tuple[int, int, float]]:
    """(step, rank, seconds later), spread over the run."""
    draw = random.Random(settings.seed)
    steps = sorted(draw.sample(range(5, STEPS - 20, 8), settings.num_deaths))
    return [(step, draw.randrange(WORLD), draw.uniform(0.0, 0.01)) for step in steps]


def _data(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a teacher, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 16, generator=generator)
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(3)) / 4
    return x, (x @ teacher).sin() + 0.1 * torch.randn(num, 4, generator=generator)


def _die_if_due(faults: Sequence[tuple[int, int, float]], folder: Path, step: int, rank: int, world: int) -> None:
    for number, (due, whose, later) in enumerate(faults):
        if step >= due and rank == whose % world:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder / f"death-{number}", os.O_CREAT | os.O_EXCL))
                threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()
                return


def learn(settings: Settings, folder: Path) -> None:
    """The program of one worker."""
    worker = phalanx.init(timeout_s=20)
    torch.manual_seed(1)
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    options: dict[str, Any] = {"lr": 2e-3, "weight_decay": 1e-2}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
    if settings.sharded:
        optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    size = BATCH if settings.keeps_batch else BATCH // WORLD
    given = DataLoader(TensorDataset(*_data(SAMPLES, 5)), batch_size=size, shuffle=True)
    loader = worker.loader(given, model, split_batches=settings.keeps_batch)
    faults, seen = deaths(settings), []

    def note(event: Event) -> None:
        seen.append(str(event.what))

    @phalanx.elastic.run(model, optimizer, schedule, loader, on_event=note)
    def train(training: phalanx.elastic.Training) -> int:
        for _ in training.epochs(EPOCHS):
            for x, y in loader:
                _die_if_due(faults, folder, training.step, worker.rank, worker.world)
                (model(x) - y).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                time.sleep(0.004)
        return training.step

    step = train()
    if worker.is_first:
        x, y = _data(1024, 6)
        with torch.no_grad():
            loss = float((model.module(x) - y).square().mean())
        params = nn.utils.parameters_to_vector(model.parameters()).tolist()
        (folder / "learnt").write_text(json.dumps({"loss": loss, "steps": step, "params": params}))


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """All workers; what came of it."""
    folder.mkdir(parents=True)
    host = Host(lambda number: learn(settings, folder), Limits(1, WORLD, WORLD), limit_s=240.0)
    host.log = str(folder / "log")
    host.run()
    assert not host.coordinator.failure, host.coordinator.failure
    learnt: dict[str, Any] = json.loads((folder / "learnt").read_text())
    lost = sum(event["event"] == "lost" for event in host.events)
    came = sum(len(event["came"]) for event in host.events if event["event"] == "forming" and event["generation"] > 1)
    return {**learnt, "lost": lost, "came": came}


def main() -> None:
    torch.set_num_threads(1)
    warm()
    for number, value in enumerate(json.load(sys.stdin)):
        print(json.dumps(run(Settings(**value), Path(sys.argv[1]) / str(number))), flush=True)


if __name__ == "__main__":
    main()
