"""How much does a collective over two hosts send, and how long does it take, compared with flat gloo?

Two hosts with two ranks each: network namespaces whose lines carry 1 Gbit/s. Flat gloo treats all ranks alike; phalanx
reduces inside each host first, and one rank a host talks to the other. Needs root, to make the hosts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.collectives import _call
from bench.measure import Ratio, Samples, ratio
from bench.namespaces import LINE, Hosts, bytes_sent
from bench.table import Result, Row, options, present

ROOT = Path(__file__).resolve().parents[1]
NUM_HOSTS, RANKS_A_HOST = 2, 2
RATE_MBIT = 1000
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = {"1 MB": 1 << 20, "25 MB": 25 << 20}
BYTES_TARGET, TIME_TARGET = 0.7, 0.75
BLOCK_BYTES = 4 << 20
BACKENDS = ("phalanx", "gloo")
PORT = 29_400


def time_here(num_rounds: int) -> dict[str, dict[str, list[list[float]]]]:
    """One rank: for each collective and size, then each backend, milliseconds and bytes sent a call, by round."""
    torch.set_num_threads(1)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    found: dict[str, dict[str, list[list[float]]]] = {}
    for collective in COLLECTIVES:
        for size, num_bytes in SIZES.items():
            numel = num_bytes // 4
            calls = {
                name: _call(collective, group, torch.zeros(numel), torch.zeros(numel // dist.get_world_size()))
                for name, group in groups.items()
            }
            num_calls = max(1, BLOCK_BYTES // num_bytes)
            found[f"{collective}, {size}"] = _take_turns(calls, num_rounds, num_calls)
    return found


def _take_turns(calls: dict[str, Callable[[], Any]], num_rounds: int, num_calls: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(-1, num_rounds):
        for name in sorted(calls, reverse=bool(number % 2)):
            dist.barrier()
            before, started = bytes_sent(), time.perf_counter()
            for _ in range(num_calls):
                calls[name]()
            elapsed = time.perf_counter() - started
            dist.barrier()  # until every rank of this host has sent what it had to
            if number >= 0:
                found[name].append([1e3 * elapsed / num_calls, (bytes_sent() - before) / num_calls])
    return found


def run(num_rounds: int) -> list[Any]:
    """`time_here` on every rank of every host."""
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(NUM_HOSTS * RANKS_A_HOST),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": LINE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that these addresses have no names
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder, Hosts(NUM_HOSTS, RATE_MBIT) as hosts:
        started = []
        for rank in range(NUM_HOSTS * RANKS_A_HOST):
            command = [sys.executable, "-m", "bench.hosts", "--here", str(num_rounds), f"{folder}/{rank}.json"]
            placed = environ | {"RANK": str(rank), "MASTER_ADDR": hosts.addresses[0]}
            started.append(subprocess.Popen(hosts.inside(rank // RANKS_A_HOST, command), env=placed, cwd=ROOT))
        try:
            if any(process.wait(timeout=280) for process in started):
                raise RuntimeError("a rank failed; see its own words above")
        finally:
            for process in started:
                process.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(started))]


def measure(num_rounds: int) -> Result:
    """Time and traffic of every collective and size."""
    assert __doc__ is not None
    result = Result("hosts", __doc__.splitlines()[0], *BACKENDS)
    result.notes.append(f"{NUM_HOSTS} hosts of {RANKS_A_HOST} ranks, {RATE_MBIT} Mbit/s each, tensors in ordinary memory")
    by_rank = run(num_rounds)
    for case in by_rank[0]:
        # The slowest rank's time; the bytes of the host that sends most.
        slowest, most = ({name: _worst(by_rank, case, name, what) for name in BACKENDS} for what in (0, 1))
        result.rows.append(_row(f"{case}: time", slowest, "ms", 1.0, TIME_TARGET))
        result.rows.append(_row(f"{case}: bytes leaving a host", most, "MB", 1e-6, BYTES_TARGET))
    return result


def _worst(by_rank: list[Any], case: str, backend: str, what: int) -> Samples:
    rounds = zip(*(found[case][backend] for found in by_rank), strict=True)
    return Samples(tuple(max(pair[what] for pair in pairs) for pairs in rounds))


def _row(case: str, samples: dict[str, Samples], unit: str, factor: float, target: float) -> Row:
    ours, theirs = (samples[name] for name in BACKENDS)
    share: Ratio = ratio(ours, theirs)
    medians = [factor * statistics.median(side.ms) for side in (ours, theirs)]
    return Row(case, medians[0], medians[1], share.median, share.low, share.high, unit=unit, target=target)


def _here(num_rounds: int, path: str) -> None:
    import phalanx  # noqa: F401  # registers the backend

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    Path(path).write_text(json.dumps(time_here(num_rounds)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        _here(int(sys.argv[2]), sys.argv[3])
        return
    parser = options("collectives over two hosts beside flat gloo")
    parser.add_argument("--rounds", type=int, default=7)
    parsed = parser.parse_args()
    present(measure(2 if parsed.quick else parsed.rounds), parsed)


if __name__ == "__main__":
    main()
