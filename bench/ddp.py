"""How long does a training step take under phalanx's DistributedDataParallel, compared with torch's?

Two ranks, each with one compute thread. Every contender trains its own copy of the model on the same data, in
the same processes, a block of steps in turn: the model alone (no communication), torch's DDP on gloo, ours on
gloo, and ours on shared memory. *Above compute* is the time a step takes beyond the model alone. Peak memory is
measured in processes of their own, from before the model was built.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench import ranks
from bench.measure import Samples, Weighing, interleave, ratio, steps_in_a_block, warm_up
from bench.models import CASES, SIZES, Case
from bench.table import Result, Row, options, present
from phalanx.launch.worker import Worker

ALONE, TORCH, OURS_GLOO, OURS_SHM = "alone", "torch", "phalanx on gloo", "phalanx"
BLOCK_S = 0.2


def _case(name: str) -> Case:
    return (CASES | SIZES)[name]


def wrap(contender: str, model: nn.Module, bucket_view: bool) -> nn.Module:
    """The model as the contender trains it."""
    if contender == ALONE:
        return model
    if contender == TORCH:
        # Torch must be told of outputs it cannot see; all our cases use every parameter.
        return nn.parallel.DistributedDataParallel(
            model, process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=bucket_view
        )
    backend = "phalanx" if contender == OURS_SHM else "gloo"
    group = dist.new_group(backend=backend)
    return phalanx.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=bucket_view)


def stepper(case: Case, contender: str, rank: int, bucket_view: bool) -> tuple[nn.Module, Callable[[], None]]:
    """A model and a function that trains it for one step on data that every contender sees."""
    torch.manual_seed(0)
    model = wrap(contender, case.build(), bucket_view)
    optimizer = case.optimizer(list(model.parameters()))
    return model, case.training(model, optimizer, rank)


def time_case(worker: Worker, case: str, num_rounds: int, shared_memory: bool, bucket_view: bool) -> Any:
    """On each rank: milliseconds a step by contender and round, and whether ours and torch's still agree."""
    torch.set_num_threads(1)
    names = [ALONE, TORCH, OURS_GLOO, *([OURS_SHM] if shared_memory else [])]
    built = {name: stepper(_case(case), name, worker.rank, bucket_view) for name in names}
    steps = {name: step for name, (_, step) in built.items()}
    num_steps = _warmed_up(steps[TORCH])
    for name in names:
        if name != TORCH:
            for _ in range(num_steps + 3):
                steps[name]()
    samples = interleave(steps, num_rounds, num_steps, dist.barrier)
    agree = all(_close(built[TORCH][0], built[name][0]) for name in names[2:])
    return {"ms": {name: found.ms for name, found in samples.items()}, "agree": agree}


def _warmed_up(step: Callable[[], None]) -> int:
    for _ in range(2):
        step()
    started = time.perf_counter()
    step()
    num_steps = steps_in_a_block(time.perf_counter() - started, BLOCK_S)
    for _ in range(num_steps):
        step()
    return num_steps


def _close(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


def weigh_case(worker: Worker, case: str, contender: str, bucket_view: bool) -> int:
    """On each rank: the peak of bytes while training, above what the process held before."""
    torch.set_num_threads(1)
    warm_up()
    with Weighing() as weighing:
        _, step = stepper(_case(case), contender, worker.rank, bucket_view)
        for _ in range(8):
            step()
    return weighing.peak - weighing.before


def time_on_ranks(world: int, arguments: dict[str, Any]) -> tuple[dict[str, Samples], bool]:
    """`time_case` on `world` ranks: milliseconds of the slowest rank, and whether the contenders agree."""
    by_rank = ranks.run(world, "bench.ddp:time_case", arguments)
    # A step has ended when its slowest rank has.
    ms = {
        name: Samples(tuple(map(max, zip(*(found["ms"][name] for found in by_rank), strict=True))))
        for name in by_rank[0]["ms"]
    }
    return ms, all(found["agree"] for found in by_rank)


def _rows(case: str, ms: dict[str, Samples], ours: str) -> list[Row]:
    whole = ratio(ms[ours], ms[TORCH])
    rows = [Row(f"{case}: step", ms[ours].median, ms[TORCH].median, whole.median, whole.low, whole.high, target=1.0)]
    mine, theirs = (Samples(tuple(a - b for a, b in zip(ms[name].ms, ms[ALONE].ms, strict=True))) for name in (ours, TORCH))
    if theirs.median > 0.02 * ms[TORCH].median and min(theirs.ms) > 0:
        above = ratio(mine, theirs)
        rows.append(
            Row(
                f"{case}: above compute",
                mine.median,
                theirs.median,
                mine.median / theirs.median,
                above.low,
                above.high,
                target=1 / 3 if case == "gpt-5m" and ours == OURS_SHM else 1.0,
            )
        )
    return rows


def _memory_rows(case: str, contenders: list[str], bucket_view: bool) -> list[Row]:
    held = {
        name: statistics.mean(
            ranks.run(2, "bench.ddp:weigh_case", {"case": case, "contender": name, "bucket_view": bucket_view})
        )
        for name in (TORCH, *contenders)
    }
    rows = []
    for ours in contenders:
        mine, theirs = held[ours] / 1e6, held[TORCH] / 1e6
        share = mine / theirs
        rows.append(Row(f"{case}: peak memory", mine, theirs, share, share, share, unit="MB", target=1.0))
    return rows


def main() -> None:
    parser = options("phalanx DDP beside torch DDP, two ranks")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these models")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--gradient-as-bucket-view", action="store_true", help="for both sides")
    parsed = parser.parse_args()
    shared_memory = "phalanx" in dist.Backend.backend_list
    view = parsed.gradient_as_bucket_view
    best = OURS_SHM if shared_memory else OURS_GLOO
    results = [Result("ddp", __doc__.splitlines()[0], best, TORCH)]
    if shared_memory:
        results.append(Result("ddp-gloo", "The same step with both sides on gloo.", OURS_GLOO, TORCH))
    for case in parsed.case or CASES:
        arguments = {
            "case": case,
            "num_rounds": 3 if parsed.quick else parsed.rounds,
            "shared_memory": shared_memory,
            "bucket_view": view,
        }
        ms, agree = time_on_ranks(2, arguments)
        for result in results:
            result.rows += _rows(case, ms, result.ours)
            if not agree:
                result.notes.append(f"{case}: parameters of the two sides differ after the run")
        if not (parsed.no_memory or parsed.quick):
            for result, row in zip(results, _memory_rows(case, [one.ours for one in results], view), strict=True):
                result.rows.append(row)
    for result in results:
        present(result, parsed)


if __name__ == "__main__":
    main()
