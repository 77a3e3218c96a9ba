"""How long does a training step take under phalanx's DistributedDataParallel, compared with torch's?

Two ranks, each with one compute thread. Every contender trains its own copy of the model on the same data, in two
processes of its own, a block of steps in turn while the others sleep: the model alone (no communication), torch's DDP on
gloo, ours on gloo, and ours on shared memory. Ours sets the C library's heap so that a step takes fewer page faults; rows
with a *plain heap* are ours without that (PHALANX_KEEP_FREED=0), which is what torch's processes have. *Above compute* is
the time a step takes beyond the model alone with the same heap. Peak memory is measured from before the model was built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench import ddp_device, ranks
from bench.measure import Samples, Weighing, ratio, warm_up
from bench.models import CASES, SIZES, Case
from bench.table import Result, Row, options, present
from bench.turns import Turns, team_samples
from bench.weight import memory_row, weigh
from phalanx.launch.worker import Worker

ALONE, ALONE_KEPT, TORCH = "alone", "alone, heap kept", "torch"
OURS_GLOO, OURS_SHM = "phalanx on gloo", "phalanx"
PLAIN = {OURS_GLOO: "phalanx on gloo, plain heap", OURS_SHM: "phalanx, plain heap"}
BLOCK_S = 0.2
TEAM = 2


def _case(name: str) -> Case:
    return (CASES | SIZES)[name]


def _backend(contender: str) -> str:
    return "phalanx" if contender in (OURS_SHM, PLAIN[OURS_SHM]) else "gloo"


def wrap(contender: str, model: nn.Module, bucket_view: bool, group: Any) -> nn.Module:
    """The model as the contender trains it, in a process with the heap that it trains with."""
    if contender not in (ALONE, TORCH, *PLAIN.values()):
        ranks.keep_freed()
    if contender in (ALONE, ALONE_KEPT):
        return model
    if contender == TORCH:
        # Torch must be told of outputs it cannot see; all our cases use every parameter.
        return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=bucket_view)
    return phalanx.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=bucket_view)


def stepper(
    case: Case, contender: str, rank: int, bucket_view: bool, group: Any = None
) -> tuple[nn.Module, Callable[[], None]]:
    """A model and a function that trains it for one step on data that every contender sees."""
    torch.manual_seed(0)
    group = group or dist.new_group(backend=_backend(contender))
    model = wrap(contender, case.build(), bucket_view, group)
    optimizer = case.optimizer(list(model.parameters()))
    return model, case.training(model, optimizer, rank)


def time_case(worker: Worker, case: str, size: int, names: list[str], num_rounds: int, bucket_view: bool) -> Any:
    """On each rank, which is one contender's: milliseconds by round, and whether its model is still like torch's."""
    torch.set_num_threads(1)
    turns = Turns(worker.rank, size, names, [_backend(name) for name in names])
    model, step = stepper(_case(case), turns.name, turns.place, bucket_view, turns.group)
    for _ in range(3):
        step()
    num_steps = turns.steps_in_a_block(TORCH, step, BLOCK_S)
    if turns.name != TORCH:
        step()
        step()
    ms = turns.interleave(step, num_rounds, num_steps)
    agrees = _is_close(model, size * names.index(TORCH))
    return {"name": turns.name, "ms": ms, "agrees": agrees or turns.name in (ALONE, ALONE_KEPT)}


def _is_close(model: nn.Module, source: int) -> bool:
    """Whether the parameters are those of rank `source`, but for rounding. All ranks ask at once."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    theirs = mine.clone()
    dist.broadcast(theirs, source)
    return torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def weigh_case(worker: Worker, case: str, contender: str, bucket_view: bool) -> int:
    """On each rank: the peak of bytes while training, above what the process held before."""
    torch.set_num_threads(1)
    warm_up()
    with Weighing() as weighing:
        _, step = stepper(_case(case), contender, worker.rank, bucket_view)
        for _ in range(8):
            step()
    return weighing.peak - weighing.before


def time_on_ranks(size: int, names: list[str], **arguments: Any) -> tuple[dict[str, Samples], bool]:
    """`time_case` with `size` ranks a contender: milliseconds of the slowest, and whether the contenders agree."""
    by_rank = ranks.run(size * len(names), "bench.ddp:time_case", {"size": size, "names": names, **arguments})
    return {name: team_samples(by_rank, name) for name in names}, all(found["agrees"] for found in by_rank)


def _rows(case: str, ms: dict[str, Samples], ours: str) -> list[Row]:
    rows = []
    for name, kind in ((ours, "step"), (PLAIN[ours], "step, plain heap")):
        whole = ratio(ms[name], ms[TORCH])
        target = 1.0 if name == ours else None
        row = Row(f"{case}: {kind}", ms[name].median, ms[TORCH].median, whole.median, whole.low, whole.high, target=target)
        rows.append(row)
    mine, theirs = _above(ms[ours], ms[ALONE_KEPT]), _above(ms[TORCH], ms[ALONE])
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


def _above(whole: Samples, compute: Samples) -> Samples:
    return Samples(tuple(a - b for a, b in zip(whole.ms, compute.ms, strict=True)))


def _memory_rows(case: str, contenders: list[str], bucket_view: bool) -> list[Row]:
    arguments = {"case": case, "bucket_view": bucket_view}
    held = {name: weigh(TEAM, "bench.ddp:weigh_case", arguments | {"contender": name}) for name in (TORCH, *contenders)}
    return [memory_row(f"{case}: peak memory", held[ours], held[TORCH]) for ours in contenders]


def _on_device(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    problem = ddp_device.unfit(parsed.device)
    if problem is not None:
        parser.error(problem)
    rounds = 3 if parsed.quick else parsed.rounds
    # Rows of sparse gradients are summed on gloo and nccl alike; their host waits are known, and not what is asked here.
    cases = parsed.case or [name for name, case in CASES.items() if not case.sparse]
    present(ddp_device.measure(cases, parsed.device, rounds, parsed.gradient_as_bucket_view), parsed)


def main() -> None:
    parser = options("phalanx DDP beside torch DDP, two ranks")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these models")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--gradient-as-bucket-view", action="store_true", help="for both sides")
    parser.add_argument("--device", default="cpu", help="cpu (default), or a kind of device of which there are two: cuda")
    parsed = parser.parse_args()
    if parsed.device != "cpu":
        _on_device(parser, parsed)
        return
    shared_memory = "phalanx" in dist.Backend.backend_list
    view = parsed.gradient_as_bucket_view
    best = OURS_SHM if shared_memory else OURS_GLOO
    results = [Result("ddp", __doc__.splitlines()[0], best, TORCH)]
    if shared_memory:
        results.append(Result("ddp-gloo", "The same step with both sides on gloo.", OURS_GLOO, TORCH))
    names = [ALONE, ALONE_KEPT, TORCH, *(name for result in results for name in (result.ours, PLAIN[result.ours]))]
    rounds = 3 if parsed.quick else parsed.rounds
    for case in parsed.case or CASES:
        ms, agree = time_on_ranks(TEAM, names, case=case, num_rounds=rounds, bucket_view=view)
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
