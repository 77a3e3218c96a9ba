"""How long do a compiled training step and its compilation take, compared with torch's DDP and torch.compile?

Two ranks, each with one compute thread, inductor on both sides. Steps: every contender trains its own copy of the
model on the same data, in the same processes, a block of steps in turn. Compilation: the first step in fresh
processes with an empty compiler cache, the contenders in turn.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench import ranks
from bench.ddp import BLOCK_S
from bench.measure import Samples, interleave, ratio, steps_in_a_block
from bench.models import CASES, Case
from bench.table import Result, Row, options, present
from phalanx.compile import phalanx_backend
from phalanx.launch.worker import Worker

TORCH, OURS_GLOO, OURS_SHM = "torch", "phalanx on gloo", "phalanx"
TARGETS = {OURS_GLOO: 1.0, OURS_SHM: 0.85}
COMPILE_TARGET = 1.1


def compiled(contender: str, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    """The wrapped model, and what to call in its place."""
    if contender == TORCH:
        theirs = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))
        return theirs, torch.compile(theirs)
    group = dist.new_group(backend="phalanx" if contender == OURS_SHM else "gloo")
    ours = phalanx.DistributedDataParallel(model, process_group=group)
    return ours, torch.compile(ours, backend=phalanx_backend)


def stepper(case: Case, contender: str, rank: int) -> tuple[nn.Module, Callable[[], None]]:
    """A model and a function that trains it for one step on data that every contender sees."""
    torch.manual_seed(0)
    wrapper, model = compiled(contender, case.build())
    optimizer = case.optimizer(list(wrapper.parameters()))
    return wrapper, case.training(model, optimizer, rank)


def time_steps(worker: Worker, case: str, contenders: Sequence[str], num_rounds: int) -> dict[str, Any]:
    """On each rank: milliseconds a step by contender and round, and whether all still agree."""
    torch.set_num_threads(1)
    built = {name: stepper(CASES[case], name, worker.rank) for name in contenders}
    steps = {name: step for name, (_, step) in built.items()}
    took = 0.0
    for step in steps.values():
        for _ in range(4):
            started = time.perf_counter()
            step()
            took = time.perf_counter() - started
    samples = interleave(steps, num_rounds, steps_in_a_block(took, BLOCK_S), dist.barrier)
    reference = list(built[contenders[0]][0].parameters())
    close = all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4)
        for wrapper, _ in built.values()
        for a, b in zip(reference, wrapper.parameters(), strict=True)
    )
    buckets = {name: len(w.plan.buckets) for name, (w, _) in built.items() if hasattr(w, "plan")}
    return {"ms": {name: found.ms for name, found in samples.items()}, "agree": close, "buckets": buckets}


def time_compilation(worker: Worker, case: str, contender: str, cache: str) -> float:
    """On each rank: seconds until the first step has ended, with an empty compiler cache."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    _, step = stepper(CASES[case], contender, worker.rank)
    dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure_steps(case: str, contenders: Sequence[str], num_rounds: int) -> tuple[dict[str, Samples], bool]:
    """Milliseconds a step of the slowest rank, by contender, and whether the sides agree."""
    arguments = {"case": case, "contenders": list(contenders), "num_rounds": num_rounds}
    by_rank = ranks.run(2, "bench.compile:time_steps", arguments)
    ms = {name: Samples(tuple(map(max, zip(*(r["ms"][name] for r in by_rank), strict=True)))) for name in contenders}
    return ms, all(found["agree"] for found in by_rank)


def measure_compilation(case: str, contenders: Sequence[str], num_rounds: int) -> dict[str, Samples]:
    """Milliseconds of the first step of the slowest rank, by contender."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        for name in contenders if number % 2 == 0 else list(contenders)[::-1]:
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-inductor-") as cache:
                arguments = {"case": case, "contender": name, "cache": cache}
                found[name].append(1e3 * max(ranks.run(2, "bench.compile:time_compilation", arguments)))
    return {name: Samples(tuple(values)) for name, values in found.items()}


def _row(case: str, ours: Samples, theirs: Samples, target: float, unit_ms: float = 1.0, unit: str = "ms") -> Row:
    found = ratio(ours, theirs)
    medians = ours.median / unit_ms, theirs.median / unit_ms
    return Row(case, *medians, found.median, found.low, found.high, unit=unit, target=target)


def main() -> None:
    parser = options("torch.compile: phalanx beside torch DDP, two ranks")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these models")
    parser.add_argument("--rounds", type=int, default=15, help="0 leaves steps out")
    parser.add_argument("--compilations", type=int, default=3, help="0 leaves compilation out")
    parsed = parser.parse_args()
    shared_memory = "phalanx" in dist.Backend.backend_list
    sides = [OURS_GLOO, *([OURS_SHM] if shared_memory else [])]
    results = {side: Result(_name(side), __doc__.splitlines()[0], side, TORCH) for side in sides}
    for case in parsed.case or ["gpt-5m"]:
        num_rounds = min(3, parsed.rounds) if parsed.quick else parsed.rounds
        ms, agree = measure_steps(case, [TORCH, *sides], num_rounds) if num_rounds else ({}, True)
        for side in sides if ms else ():
            results[side].rows.append(_row(f"{case}: step", ms[side], ms[TORCH], TARGETS[side]))
            if not agree:
                results[side].notes.append(f"{case}: parameters of the sides differ after the run")
        num_compilations = min(1, parsed.compilations) if parsed.quick else parsed.compilations
        if num_compilations:
            took = measure_compilation(case, [TORCH, OURS_GLOO], num_compilations)
            row = _row(f"{case}: first step", took[OURS_GLOO], took[TORCH], COMPILE_TARGET, 1e3, "s")
            results[OURS_GLOO].rows.append(row)
    for result in results.values():
        if result.rows:
            present(result, parsed)


def _name(side: str) -> str:
    return "compile" if side == OURS_SHM else "compile-gloo"


if __name__ == "__main__":
    main()
