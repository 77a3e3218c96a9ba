"""How long does training stand still for a checkpoint, and how long until it is on the disk?

Two ranks, a model with Adam's state, alike on both ranks; every side divides the writing between the ranks where it
can. Beside one copy of a rank's share in memory and one write of it with fsync, which nobody can beat; beside
`torch.save` by rank 0; beside torch.distributed.checkpoint's `save` and `async_save`. All in the same processes, in
turns; a save is finished, and deleted, before the next one begins. Then the same for the sharded optimizer, where
torch has nothing asynchronous that divides.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from bench import ranks
from bench.measure import Samples, blocks, ratio
from bench.table import Result, Row, options, present
from phalanx import Checkpointer, DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.launch.worker import Worker

OURS, SHARDED = "phalanx", "phalanx, sharded optimizer"
COPY, WRITE = "one copy in memory", "one write and fsync"
TORCH_SAVE, DCP_SAVE, DCP_ASYNC = "torch.save", "dcp.save", "dcp.async_save"
LAYERS = 12
MOST_SECONDS = 240.0

# Seconds that training stands still, and seconds until all is on the disk.
Timed = Callable[[str], tuple[float, float]]


def _model(width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def _trained(width: int, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(_model(width))
    made: torch.optim.Optimizer
    if sharded:
        made = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, width)).square().mean().backward()
    made.step()
    made.zero_grad()
    return model, made


def _ours(width: int, sharded: bool, root: str) -> Timed:
    model, optimizer = _trained(width, sharded)
    checkpointer = Checkpointer(f"{root}/ours-{sharded}", model, optimizer)

    def save(folder: str) -> tuple[float, float]:
        begun = time.perf_counter()
        checkpointer.save(0)
        stalled = time.perf_counter() - begun
        checkpointer.wait()
        total = time.perf_counter() - begun
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(checkpointer.folder)
        return stalled, total

    return save


def _floor(num_bytes: int, writes: bool) -> Timed:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy(folder: str) -> tuple[float, float]:
        begun = time.perf_counter()
        if not writes:
            target.copy_(source)
        else:
            data: Any = source.numpy()
            with open(f"{folder}-{dist.get_rank()}", "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left[: 8 << 20]) :]
                os.fsync(file.fileno())
        spent = time.perf_counter() - begun
        Path(f"{folder}-{dist.get_rank()}").unlink(missing_ok=True)
        return spent, spent

    return copy


def _torchs(width: int) -> dict[str, Timed]:
    model, optimizer = _trained(width, sharded=False)

    def state() -> dict[str, Any]:
        weights, states = get_state_dict(model.module, optimizer)
        return {"model": weights, "optimizer": states}

    def torch_save(folder: str) -> tuple[float, float]:
        begun = time.perf_counter()
        if dist.get_rank() == 0:
            with open(f"{folder}.pt", "wb") as file:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        spent = time.perf_counter() - begun
        Path(f"{folder}.pt").unlink(missing_ok=True)
        return spent, spent

    def save(folder: str) -> tuple[float, float]:
        begun = time.perf_counter()
        dcp.save(state(), checkpoint_id=folder)
        spent = time.perf_counter() - begun
        return spent, spent

    def async_save(folder: str) -> tuple[float, float]:
        begun = time.perf_counter()
        future: Any = dcp.async_save(state(), checkpoint_id=folder)
        stalled = time.perf_counter() - begun
        future.result()
        return stalled, time.perf_counter() - begun

    return {TORCH_SAVE: torch_save, DCP_SAVE: save, DCP_ASYNC: async_save}


def measure(worker: Worker, width: int, num_rounds: int, folder: str) -> dict[str, Any]:
    """On each rank: by contender and round, milliseconds of standing still and until the end; and bytes of a share."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    numel = sum(param.numel() for param in _model(width).parameters())
    share = 3 * 4 * numel // worker.world
    contenders: dict[str, Timed] = {
        OURS: _ours(width, False, folder),
        SHARDED: _ours(width, True, folder),
        COPY: _floor(share, writes=False),
        WRITE: _floor(share, writes=True),
        **_torchs(width),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    ends = time.monotonic() + MOST_SECONDS
    for number, name in enumerate(blocks(list(contenders), num_rounds)):
        dist.barrier()
        found[name].append(contenders[name](f"{folder}/{number}"))
        dist.barrier()
        if worker.rank == 0:
            shutil.rmtree(f"{folder}/{number}", ignore_errors=True)
        # All ranks stop in the same round: a slow disk must not make this last for ever.
        late = torch.tensor([float(time.monotonic() > ends)])
        dist.all_reduce(late)
        if late.item() and (number + 1) % len(contenders) == 0 and number >= 2 * len(contenders):
            break
    # The first round warms up: memory is made then, once.
    ms = {name: [[1e3 * a, 1e3 * b] for a, b in values[1:]] for name, values in found.items()}
    return {"ms": ms, "share": share}


def _slowest(by_rank: list[dict[str, Any]], name: str, which: int) -> Samples:
    spent = [[pair[which] for pair in one["ms"][name]] for one in by_rank]
    return Samples(tuple(map(max, zip(*spent, strict=True))))


def main() -> None:
    parser = options("what a checkpoint costs, two ranks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=2000, help="of twelve layers; 2000 makes 576 MB with Adam's state")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parsed = parser.parse_args()
    result = Result("checkpoint", __doc__.splitlines()[0], "phalanx", "the other")
    rounds, width = (2, 500) if parsed.quick else (parsed.rounds, parsed.width)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=parsed.folder) as folder:
        by_rank = ranks.run(2, "bench.checkpoint:measure", {"width": width, "num_rounds": rounds, "folder": folder})
    stall, total = 0, 1
    rows = [
        (OURS, COPY, stall, 1.3),
        (SHARDED, COPY, stall, 1.3),
        (OURS, DCP_ASYNC, stall, 0.5),
        (OURS, DCP_SAVE, stall, None),
        (OURS, TORCH_SAVE, stall, None),
        (OURS, WRITE, total, 1.2),
        (SHARDED, WRITE, total, 1.2),
        (OURS, DCP_SAVE, total, None),
        (OURS, DCP_ASYNC, total, None),
        (OURS, TORCH_SAVE, total, None),
    ]
    for ours, theirs, which, target in rows:
        mine, other = _slowest(by_rank, ours, which), _slowest(by_rank, theirs, which)
        each = ratio(mine, other)
        case = f"{'standing still' if which == stall else 'until on the disk'}: {ours} over {theirs}"
        result.rows.append(Row(case, mine.median, other.median, each.median, each.low, each.high, target=target))
    result.notes.append(f"a rank's share: {by_rank[0]['share'] / 1e6:.0f} MB; the slower of two ranks counts")
    present(result, parsed)


if __name__ == "__main__":
    main()
