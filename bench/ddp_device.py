"""How long does a training step take on two GPUs under phalanx's DistributedDataParallel, compared with torch's?

Called by `bench.ddp --device cuda`. Both sides use the device's own backend (nccl). Every contender has two processes of its
own, one per GPU, which take turns as on the CPU; time is taken when the device has finished a block of steps. **Never run
where this was written**, which has no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench import ranks
from bench.measure import ratio
from bench.models import CASES, Batch, Case
from bench.table import Result, Row
from bench.turns import Turns, team_samples
from phalanx.launch.worker import Worker

ALONE, TORCH, OURS = "alone", "torch", "phalanx"
NAMES = [ALONE, TORCH, OURS]
TEAM = 2
BLOCK_S = 0.5


def unfit(kind: str) -> str | None:
    """Why this machine cannot measure on devices of this kind, in words; None if it can."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        there = "none" if found is None else found.type
        return f"--device {kind}: torch can use no such device here (it has {there}), and {TEAM} are needed."
    count = torch.accelerator.device_count()
    if count < TEAM:
        return f"--device {kind}: each of {TEAM} ranks needs a device of its own, and there is {count}."
    return None


def on_device(case: Case, device: torch.device) -> Case:
    """The same case with model and data on a device. Batches are moved once, not in the steps that are timed."""

    def batch(generator: torch.Generator) -> Batch:
        return tuple(tensor.to(device) for tensor in case.batch(generator))

    return replace(case, build=lambda: case.build().to(device), batch=batch)


def time_case(worker: Worker, case: str, kind: str, num_rounds: int, bucket_view: bool) -> Any:
    """On each rank, which is one contender's: milliseconds by round, and what its own figures say of overlap."""
    backend = dist.get_default_backend_for_device(kind)
    turns = Turns(worker.rank, TEAM, NAMES, [backend] * len(NAMES))
    device = torch.device(kind, turns.place)
    torch.accelerator.set_device_index(device)
    chosen = on_device(CASES[case], device)
    torch.manual_seed(0)
    model = chosen.build()
    options = {"process_group": turns.group, "gradient_as_bucket_view": bucket_view}
    if turns.name == TORCH:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], **options)
    elif turns.name == OURS:
        model = phalanx.DistributedDataParallel(model, device_ids=[device.index], **options)
    step = chosen.training(model, chosen.optimizer(list(model.parameters())), turns.place)
    for _ in range(12):  # torch and ours settle their buckets, and ours samples its first ten steps
        step()
    torch.accelerator.synchronize()
    num_steps = turns.steps_in_a_block(TORCH, step, BLOCK_S, torch.accelerator.synchronize)
    ms = turns.interleave(step, num_rounds, num_steps, torch.accelerator.synchronize)
    stats = model.stats() if isinstance(model, phalanx.DistributedDataParallel) else None
    return {"name": turns.name, "ms": ms, "overlap": None if stats is None else stats.overlap}


def measure(cases: list[str], kind: str, num_rounds: int, bucket_view: bool) -> Result:
    """All cases, as one result."""
    result = Result(f"ddp-{kind}", __doc__.splitlines()[0], OURS, TORCH)
    result.machine["devices"] = f"{torch.accelerator.device_count()} × {kind}"
    for case in cases:
        arguments = {"case": case, "kind": kind, "num_rounds": num_rounds, "bucket_view": bucket_view}
        by_rank = ranks.run(TEAM * len(NAMES), "bench.ddp_device:time_case", arguments)
        ms = {name: team_samples(by_rank, name) for name in NAMES}
        whole = ratio(ms[OURS], ms[TORCH])
        row = Row(f"{case}: step", ms[OURS].median, ms[TORCH].median, whole.median, whole.low, whole.high)
        row.note = f"alone {ms[ALONE].median:.2f} ms"
        result.rows.append(row)
        overlap = [found["overlap"] for found in by_rank if found["overlap"] is not None]
        result.notes.append(f"{case}: {min(overlap):.0%} of communication hidden, by events of the device")
    return result
