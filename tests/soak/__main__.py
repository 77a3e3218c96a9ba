"""`python -m tests.soak --seconds 600 --seed 0`: faults at random for a bounded time.

Every fault is checked to have fired, and every rank to have made of it what it must (tests/comm/faults.py).
Stops at the first case that goes wrong, and prints how to draw it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.cluster.pool import stop_pool
from tests.comm.faults import Fault
from tests.comm.test_faults import run_killing_plan, run_plans
from tests.soak.draw import draw_batch, draw_plan

_BATCH = 16
_WORLDS = (2, 3, 4, 5)


def main() -> int:
    """Draw and run until the time or the number of cases is up; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--cases", type=int, default=1_000_000, help="stop after this many cases")
    parser.add_argument("--seed", type=int, default=0, help="draw from this seed")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    seed, counts = arguments.seed, Counter[tuple[str, str]]()
    try:
        while time.monotonic() < deadline and counts.total() < arguments.cases:
            counts += _round(seed)
            seed += 1
    except BaseException as error:
        print(f"case of seed {seed} went wrong (again: --seed {seed} --cases 1): {error}", file=sys.stderr)
        return 1
    finally:
        stop_pool()
        _print(counts, arguments.seed, seed)
    return 0


def _round(seed: int) -> Counter[tuple[str, str]]:
    """One batch of faults that kill nobody, and two that do."""
    chance = random.Random(seed)
    world = chance.choice(_WORLDS)
    batch = draw_batch(chance, world, _BATCH)
    killing = [draw_plan(chance, Fault.KILL, world) for _ in range(2)]
    with tempfile.TemporaryDirectory() as notes:
        run_plans(batch, world, Path(notes))
    for plan in killing:
        with tempfile.TemporaryDirectory() as notes:
            run_killing_plan(plan, world, Path(notes))
    hosts = ["one host" if plan.layout is None else "several hosts" for plan in (*batch, *killing)]
    return Counter(zip((plan.fault.value for plan in (*batch, *killing)), hosts, strict=True))


def _print(counts: Counter[tuple[str, str]], first: int, last: int) -> None:
    table = Table(title=f"faults fired, seeds {first} to {last - 1}: {counts.total()} in all")
    table.add_column("fault")
    for hosts in ("one host", "several hosts"):
        table.add_column(hosts, justify="right")
    for fault in Fault:
        row = [str(counts[fault.value, hosts]) for hosts in ("one host", "several hosts")]
        table.add_row(fault.value, *row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
