"""How long does a training step take with phalanx's ZeroRedundancyOptimizer, compared with torch's?

Two ranks, each with one compute thread, Adam. Every contender trains its own copy of the model on the same data, in two
processes of its own, a block of steps in turn while the others sleep: torch's optimizer behind torch's DDP on gloo, and ours
behind ours, on gloo and on shared memory: overlapped with backward, the same without the setting of the heap that our
DistributedDataParallel makes (PHALANX_KEEP_FREED=0, which is what torch's processes have), with one copy of the parameters
for both ranks (`shared_parameters=True`), and alone. Torch's optimizer takes part twice, as it comes and with
`parameters_as_bucket_view=True`, its faster setting: rows *against bucket views*.
*Update* is the time of `step()` alone, on gradients that are there. State is that of the rank with the most of it,
against the total divided by the ranks; peak memory is sampled in processes of their own, from before the model was built,
memory that both ranks share counted half in each. DeepSpeed is left out unless it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import phalanx
from bench import ranks
from bench.measure import Weighing, ratio, warm_up
from bench.models import CASES, Batch, Case
from bench.table import Result, Row, options, present
from bench.turns import Turns, team_samples
from bench.weight import memory_row, weigh
from phalanx.launch.worker import Worker
from phalanx.zero import ZeroRedundancyOptimizer

TORCH = "torch"
TORCH_VIEWS = "torch with bucket views"
OURS = "phalanx"
UNKEPT = "overlapped, plain heap"
MODELS = ("gpt-5m", "gpt-30m")
TARGETS = {"phalanx": 0.6, "gloo": 0.85}
BLOCK_S = 0.2
TEAM = 2

Step = Callable[[], None]


class Lopsided(nn.Module):
    """One embedding with 80 % of the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 200)
        self.layers = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 200), nn.Linear(200, 200))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.table(rows))
        return out


def _lopsided_batch(generator: torch.Generator) -> Batch:
    return (torch.randint(4000, (16,), generator=generator),)


def _lopsided_loss(model: nn.Module, given: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(given[0]).square().mean()
    return loss


LOPSIDED = Case("lopsided", "one embedding with 80 % of the elements", Lopsided, _lopsided_batch, _lopsided_loss)


def _case(name: str) -> Case:
    return LOPSIDED if name == LOPSIDED.name else CASES[name]


def contender(name: str, case: Case, place: int, group: Any) -> tuple[Any, Step, Step]:
    """The optimizer, a function that trains for one step, and one that only updates."""
    torch.manual_seed(0)
    model = case.build()
    if name in (TORCH, TORCH_VIEWS):
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, process_group=group)
        optimizer: Any = TorchZero(
            wrapped.parameters(),
            torch.optim.Adam,
            process_group=group,
            parameters_as_bucket_view=name == TORCH_VIEWS,
            lr=1e-4,
        )
    else:
        kind = name.split("/")[1]
        if kind != UNKEPT:
            ranks.keep_freed()
        wrapped = phalanx.DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            torch.optim.Adam,
            process_group=group,
            parameters_as_bucket_view=True,
            overlap_with_ddp=kind != "alone",
            shared_parameters=kind == "one copy",
            lr=1e-4,
        )
    return optimizer, case.training(wrapped, optimizer, place), optimizer.step


def _backend(name: str) -> str:
    return "gloo" if name in (TORCH, TORCH_VIEWS) else name.split("/")[0]


def time_case(worker: Worker, case: str, names: list[str], num_rounds: int, only_update: bool) -> Any:
    """On each rank, which is one contender's: milliseconds by round, and the bytes of state."""
    torch.set_num_threads(1)
    turns = Turns(worker.rank, TEAM, names, [_backend(name) for name in names])
    optimizer, step, update = contender(turns.name, _case(case), turns.place, turns.group)
    for _ in range(3):
        step()
    timed = update if only_update else step
    ms = turns.interleave(timed, num_rounds, turns.steps_in_a_block(TORCH, timed, BLOCK_S))
    return {"name": turns.name, "ms": ms, "state": _state_bytes(optimizer)}


def _state_bytes(optimizer: Any) -> int:
    held = [value for state in optimizer.optim.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))


def weigh_case(worker: Worker, case: str, name: str) -> int:
    """On each rank: the peak of bytes while training, above what the process held before."""
    torch.set_num_threads(1)
    group = dist.new_group(backend=_backend(name))
    warm_up()
    with Weighing() as weighing:
        _, step, _ = contender(name, _case(case), worker.rank, group)
        for _ in range(6):
            step()
    return weighing.peak - weighing.before


def _timing_rows(case: str, backends: list[str], num_rounds: int, only_update: bool) -> list[Row]:
    kinds = ("alone",) if only_update else ("overlapped", UNKEPT, "one copy", "alone")
    ours = [f"{backend}/{kind}" for backend in backends for kind in kinds]
    names = [TORCH, TORCH_VIEWS, *ours]
    arguments = {"case": case, "names": names, "num_rounds": num_rounds, "only_update": only_update}
    by_rank = ranks.run(TEAM * len(names), "bench.zero:time_case", arguments)
    rows = []
    for name in ours:
        rows.append(_timing_row(case, by_rank, name, TORCH, only_update))
        if name.split("/")[1] in ("overlapped", "alone"):
            rows.append(_timing_row(case, by_rank, name, TORCH_VIEWS, only_update))
    if not only_update:
        rows.append(_state_row(case, by_rank, ours[0]))
    return rows


def _timing_row(case: str, by_rank: list[Any], name: str, other: str, only_update: bool) -> Row:
    backend, kind = name.split("/")
    mine, theirs = team_samples(by_rank, name), team_samples(by_rank, other)
    share = ratio(mine, theirs)
    against = ", against bucket views" if other == TORCH_VIEWS else ""
    title = f"{case}: {'update' if only_update else 'step'}, {kind}, {_words(backend)}{against}"
    target = TARGETS[backend] if kind in ("overlapped", "one copy") else None
    return Row(title, mine.median, theirs.median, share.median, share.low, share.high, target=target)


def _words(backend: str) -> str:
    return "shared memory" if backend == "phalanx" else backend


def _state_row(case: str, by_rank: list[Any], name: str) -> Row:
    ours, theirs = ([found["state"] for found in by_rank if found["name"] == one] for one in (name, TORCH))
    mean = sum(ours) / len(ours)
    note = f"largest rank over the mean: ours {max(ours) / mean:.3f}, torch {max(theirs) * len(theirs) / sum(theirs):.3f}"
    share = max(ours) / max(theirs)
    return Row(f"{case}: state, largest rank", max(ours) / 1e6, max(theirs) / 1e6, share, share, share, unit="MB", note=note)


def _memory_rows(case: str, names: list[str]) -> list[Row]:
    everybody = (TORCH, TORCH_VIEWS, *names)
    held = {name: weigh(TEAM, "bench.zero:weigh_case", {"case": case, "name": name}) for name in everybody}
    rows = []
    for name in names:
        title = f"{case}: peak memory, {name.split('/')[1]}, {_words(name.split('/')[0])}"
        rows.append(memory_row(title, held[name], held[TORCH]))
        rows.append(memory_row(f"{title}, against bucket views", held[name], held[TORCH_VIEWS]))
    return rows


def measure(cases: list[str], num_rounds: int, with_memory: bool) -> Result:
    """The whole comparison."""
    backends = [one for one in ("phalanx", "gloo") if one in dist.Backend.backend_list]
    result = Result("zero", __doc__.splitlines()[0] if __doc__ else "", OURS, TORCH)
    for case in cases:
        result.rows += _timing_rows(case, backends, num_rounds, only_update=False)
        if case != LOPSIDED.name:
            result.rows += _timing_rows(case, backends, num_rounds, only_update=True)
        if with_memory and case != LOPSIDED.name:
            result.rows += _memory_rows(case, [f"{backend}/overlapped" for backend in backends])
    return result


def main() -> None:
    parser = options("phalanx ZeroRedundancyOptimizer beside torch's, two ranks, Adam")
    parser.add_argument("--case", action="append", choices=[*MODELS, LOPSIDED.name], help="only these models")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parsed = parser.parse_args()
    rounds = 3 if parsed.quick else parsed.rounds
    cases = parsed.case or [*MODELS, LOPSIDED.name]
    present(measure(cases, rounds, not (parsed.no_memory or parsed.quick)), parsed)


if __name__ == "__main__":
    main()
