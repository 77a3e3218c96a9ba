"""How long do collectives through shared memory take, compared with gloo over loopback?

Both backends' groups live in the same processes and take turns, a block of calls each. *Segment*: tensors from
`Collectives.allocate`, which every rank can reach; *in place*: the same, a rank's part being its slice of the whole, as a
bucket's is; *ordinary*: any other tensor. Two more tables compare with a plain copy
of as many bytes by one rank while the others rest, and, where it is installed, with MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench import mpi, ranks
from bench.measure import Samples, interleave, ratio
from bench.table import Result, Row, options, present
from phalanx.comm.collectives import Collectives
from phalanx.comm.group.direct import collectives_of
from phalanx.launch.worker import Worker

GLOO, SEGMENT, IN_PLACE, ORDINARY, COPY = "gloo", "segment", "in place", "ordinary", "copy"
SIZES = {"4 kB": 1 << 12, "1 MB": 1 << 20, "25 MB": 25 << 20}
BLOCK_S = 0.04
# How many times faster than gloo, by (collective, ranks, where the tensors lie) and size.
TARGETS = {
    ("all_reduce", 2, SEGMENT): (8.0, 5.0, 6.0),
    ("all_reduce", 2, ORDINARY): (6.0, 4.0, 3.5),
    ("all_reduce", 4, SEGMENT): (20.0, 8.0, 5.0),
    ("reduce_scatter", 2, SEGMENT): (8.0, 5.0, 6.0),
    ("reduce_scatter", 2, IN_PLACE): (8.0, 5.0, 6.0),
    ("all_gather", 2, SEGMENT): (8.0, 5.0, 6.0),
    ("all_gather", 2, IN_PLACE): (8.0, 5.0, 6.0),
}
COPY_TARGET = 1.8
COPY_SIZE = "25 MB"
MPI_TARGET = 1.0
MPI_FROM = 1 << 20

# By collective, size and contender.
Timings = dict[tuple[str, str, str], Samples]


def _call(collective: str, group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], Any]:
    """The collective on tensors of its own: `whole` is what all ranks have together, `part` one rank's."""
    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(part, whole, group=group)
        case "all_gather":
            return lambda: dist.all_gather_single(whole, part, group=group)
    raise ValueError(f"no collective {collective!r} to measure")


def time_all(worker: Worker, cases: list[tuple[str, int, list[str]]], num_rounds: int) -> list[dict[str, list[float]]]:
    """On each rank and for each case of collective, bytes and places: milliseconds a call by contender and round."""
    torch.set_num_threads(1)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "phalanx")}
    direct = collectives_of(groups["phalanx"])
    assert direct is not None, "a phalanx group has a direct path"
    found = [_time_case(worker, groups, direct, case, num_rounds) for case in map(tuple, cases)]
    for group in groups.values():
        dist.destroy_process_group(group)
    return found


def _time_case(
    worker: Worker,
    groups: dict[str, dist.ProcessGroup],
    direct: Collectives,
    case: tuple[str, int, list[str]],
    num_rounds: int,
) -> dict[str, list[float]]:
    collective, num_bytes, places = case
    numel = num_bytes // 4

    def make(numel: int, place: str) -> torch.Tensor:
        if place in (SEGMENT, IN_PLACE):
            return direct.allocate(numel, torch.float32, torch.device("cpu"))
        return torch.zeros(numel)

    calls: dict[str, Callable[[], Any]] = {}
    for place in (GLOO, *places):
        group, whole, width = groups["gloo" if place == GLOO else "phalanx"], make(numel, place), numel // worker.world
        part = whole[worker.rank * width :][:width] if place == IN_PLACE else make(width, place)
        calls[place] = _call(collective, group, whole, part)
    source, target = torch.zeros(numel), torch.zeros(numel)
    calls[COPY] = (lambda: target.copy_(source)) if worker.rank == 0 else (lambda: None)
    blocks = {name: _Block(call) for name, call in calls.items()}
    interleave({name: block.run for name, block in blocks.items()}, num_rounds, 1, dist.barrier)
    return {name: block.ms[1:] for name, block in blocks.items()}  # the first round warms up


class _Block:
    """Calls of one contender in a row. Keeps the time itself, since the ranks come apart from the barrier before it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ms: list[float] = []
        self._call = call
        self._num_calls = 1
        # Blocks of about the same length for all, though calls are not.
        while (elapsed := self._time()) < BLOCK_S / 4:
            self._num_calls *= 2
        self._num_calls = max(1, round(self._num_calls * BLOCK_S / elapsed))

    def run(self) -> None:
        self._call()  # brings the ranks together as this contender does it
        started = time.perf_counter()
        for _ in range(self._num_calls):
            self._call()
        self.ms.append(1e3 * (time.perf_counter() - started) / self._num_calls)

    def _time(self) -> float:
        """Seconds of a block on the slowest rank: every rank must make the same number of calls."""
        dist.barrier()
        self.run()
        slowest = torch.tensor([1e-3 * self.ms.pop() * self._num_calls])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def time_on_ranks(world: int, cases: list[tuple[str, str, list[str]]], num_rounds: int) -> Timings:
    """`time_all` on `world` ranks: milliseconds of the slowest."""
    in_bytes = [(collective, SIZES[size], places) for collective, size, places in cases]
    by_rank = ranks.run(world, "bench.collectives:time_all", {"cases": in_bytes, "num_rounds": num_rounds})
    timings: Timings = {}
    for (collective, size, _), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        for name in found[0]:
            slowest = map(max, zip(*(one[name] for one in found), strict=True))
            timings[collective, size, name] = Samples(tuple(slowest))
    return timings


def measure(num_rounds: int, wanted: list[tuple[str, int, str]]) -> tuple[Result, Result]:
    """Every wanted comparison with gloo, and that with a plain copy."""
    assert __doc__ is not None
    result = Result("collectives", __doc__.splitlines()[0], "phalanx", "gloo")
    limit = Result("collectives-copy", "How far is a collective from a plain copy?", "phalanx", "copy")
    for world in dict.fromkeys(world for _, world, _ in wanted):
        here = [(collective, place) for collective, w, place in wanted if w == world]
        cases = [
            (collective, size, [place for c, place in here if c == collective])
            for collective in dict.fromkeys(c for c, _ in here)
            for size in SIZES
        ]
        timings = time_on_ranks(world, cases, num_rounds)
        for collective, place in here:
            for size, target in zip(SIZES, TARGETS[collective, world, place], strict=True):
                ours, gloo = timings[collective, size, place], timings[collective, size, GLOO]
                case = f"{collective}, {world} ranks, {place}, {size}"
                result.rows.append(_costs(case, ours, gloo, 1 / target))
                if (collective, world, place, size) == ("all_reduce", 2, SEGMENT, COPY_SIZE):
                    limit.rows.append(_costs(case, ours, timings[collective, size, COPY], COPY_TARGET))
    return result, limit


def _costs(case: str, ours: Samples, theirs: Samples, target: float) -> Row:
    """A row that says how much ours takes of theirs."""
    share = ratio(ours, theirs)
    return Row(case, ours.median, theirs.median, share.median, share.low, share.high, target=target)


def measure_mpi(result: Result, num_rounds: int) -> Result:
    """The all_reduces of `result` by MPI, in a run of its own right after."""
    beside = Result("collectives-mpi", "How long does MPI take, which waits by polling?", "phalanx", "mpi")
    ours = {row.case: row for row in result.rows}
    for world in dict.fromkeys(world for _, world, _ in TARGETS):
        cases = [(f"all_reduce, {world} ranks, {SEGMENT}, {size}", num_bytes) for size, num_bytes in SIZES.items()]
        if all(case in ours for case, _ in cases):
            found = mpi.time_all_reduces(world, [num_bytes for _, num_bytes in cases], num_rounds)
            for (case, num_bytes), theirs in zip(cases, found, strict=True):
                share = ours[case].ours / theirs
                target = MPI_TARGET if num_bytes >= MPI_FROM else None
                beside.rows.append(Row(case, ours[case].ours, theirs, share, share, share, target=target))
    return beside


def main() -> None:
    parser = options("collectives through shared memory beside gloo")
    parser.add_argument("--collective", action="append", choices=sorted({c for c, _, _ in TARGETS}), help="only these")
    parser.add_argument("--ranks", action="append", type=int, choices=sorted({w for _, w, _ in TARGETS}), help="only these")
    parser.add_argument("--rounds", type=int, default=15)
    parsed = parser.parse_args()
    num_rounds = 3 if parsed.quick else parsed.rounds
    wanted = [
        (collective, world, place)
        for collective, world, place in TARGETS
        if collective in (parsed.collective or [collective]) and world in (parsed.ranks or [world])
    ]
    result, limit = measure(num_rounds, wanted)
    present(result, parsed)
    if limit.rows:
        present(limit, parsed)
    if not mpi.is_installed():
        print("no comparison with MPI: it is not installed (pip install mpich mpi4py)")
    elif (beside := measure_mpi(result, num_rounds)).rows:
        present(beside, parsed)


if __name__ == "__main__":
    main()
