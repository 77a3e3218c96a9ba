"""Runs made up in full, so that what a report must say is known exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from phalanx.observe import trace
from phalanx.plan.buckets import BucketPlan
from phalanx.plan.params import ParamSpec

MS = 1_000_000


def header(rank: int, world: int, **changes: Any) -> dict[str, Any]:
    values = {
        "phalanx_trace": trace.FORMAT_VERSION,
        "rank": rank,
        "world": world,
        "pid": 100 + rank,
        "host": "host-a",
        "boot": "boot-a",
        "main_thread": 1,
        "perf_ns": 5_000 * MS,
        "wall_ns": 1_700_000_000_000 * MS,
    }
    return values | changes


def write_trace(directory: Path, rank: int, world: int, events: list[list[Any]], **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"trace-rank{rank:05d}.jsonl"
    lines = [json.dumps(header(rank, world, **changes)), *map(json.dumps, events)]
    path.write_text("\n".join(lines) + "\n")
    return path


def plan() -> BucketPlan:
    """Two buckets: 1 MB of head, 4 MB of embedding."""
    shapes = {"embed.weight": (1000, 1000), "head.weight": (250, 999), "head.bias": (250,)}
    specs = tuple(
        ParamSpec(name, shape, (shape[-1], 1) if len(shape) == 2 else (1,), torch.float32, "cpu")
        for name, shape in shapes.items()
    )
    buckets = [[2, 1], [0]]
    return BucketPlan.from_json(
        {"version": 1, "caps_bytes": [1, 2], "specs": [s.to_json() for s in specs], "buckets": buckets}
    )


def training_events(rank: int, num_steps: int, late_ms: float = 0.0) -> list[list[Any]]:
    """Steps of 10 ms forward, 20 ms backward (`late_ms` more), two buckets, then a wait and an optimizer.

    Bucket 0 travels for 8 ms under backward, bucket 1 starts 2 ms before the end of the slowest rank's
    backward and ends 4 ms after it; every rank waits until then. Backward covers the wait.
    """
    slowest = 20.0 if not late_ms else 20.0 + abs(late_ms)
    mine = 20.0 + max(late_ms, 0.0)
    events: list[list[Any]] = []
    length = 10 + slowest + 4 + 3

    def span(name: str, start: float, end: float, thread: int = 1, **attrs: Any) -> None:
        events.append(["span", name, int(start * MS), int(end * MS), thread, attrs])

    for step in range(num_steps):
        t = 6_000 + step * length
        end = t + 10 + slowest + 4
        span("forward", t, t + 10, step=step)
        span("backward", t + 10, t + 10 + mine, step=step)
        span("waiting", t + 10 + mine, end, step=step)
        events.append(["instant", "bucket_filled", int((t + 14) * MS), 1, {"bucket": 0}])
        span("reduce", t + 14, t + 22, 2, bucket=0, bytes=1_000_000)
        span("reduce", end - 6, end, 2, bucket=1, bytes=4_000_000)
        span("optimizer", end, end + 3, step=step)
        events.append(["scalar", "loss", int(end * MS), step, 4.0 / (1 + 0.1 * step) + 0.01 * rank])
        events.append(["scalar", "tokens_per_s", int(end * MS), step, 1000.0 + 7 * step])
        events.append(["scalar", "resident_bytes", int(end * MS), None, 3.0e8 + 1e6 * step])
    return events


def write_run(root: Path, world: int = 2, num_steps: int = 30, late_rank: int | None = None) -> Path:
    """A whole run directory; `late_rank` needs 6 ms more in every backward."""
    attempt = root / "attempt-0"
    for rank in range(world):
        late = 0.0 if late_rank is None else (6.0 if rank == late_rank else -6.0)
        events = training_events(rank, num_steps, late)
        if rank == 0:
            events.append(["fact", "plan", 6_000 * MS, plan().to_json()])
        memory = {"state": 2_000_000, "unsharded_state": 4_000_000, "parameters": 2_000_000}
        events.append(["fact", "memory", 6_000 * MS, memory])
        write_trace(attempt, rank, world, events)
    facts = {"command": ["train.py", "--lr", "0.1"], "nproc": world, "state": "finished", "seconds": 12.5}
    (root / "run.json").write_text(json.dumps(facts))
    return root
