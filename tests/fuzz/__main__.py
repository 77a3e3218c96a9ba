"""`python -m tests.fuzz`: programs from one seed on, for as long as it is given, and what failed, kind by kind."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.fuzz.draw import draw
from tests.fuzz.program import Program
from tests.fuzz.runner import Failure, Runner
from tests.fuzz.script import script_of
from tests.fuzz.shrink import shrink

# Drawn together, so that programs for the same ranks and backend fill a batch.
CHUNK = 160


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on drawing programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--count", type=int, default=None, help="at most so many programs")
    parser.add_argument("--ranks", type=int, nargs="*", default=None, help="only programs for so many ranks")
    parser.add_argument("--mode", nargs="*", default=None, help="only programs of these modes")
    parser.add_argument("--replay", type=int, nargs="*", default=None, help="these seeds and no others")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for each new kind of failure; 0 for none")
    parser.add_argument("--most-kinds", type=int, default=10, help="shrink no more kinds of failures than this")
    given = parser.parse_args(arguments)
    found: dict[str, list[Failure]] = defaultdict(list)
    started, count = time.monotonic(), 0
    with Runner() as runner:
        for programs in _chunks(given, started):
            for _, failure in runner.run(programs):
                count += 1
                if failure is not None:
                    found[failure.signature].append(failure)
                    if len(found[failure.signature]) == 1:
                        _report(failure, runner, given.shrink_seconds if len(found) <= given.most_kinds else 0.0)
            took = time.monotonic() - started
            print(f"{count} programs in {took:.0f} s, {sum(map(len, found.values()))} failed", flush=True)
    for signature, failures in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(failures):4} × {signature}   seeds {[f.program.seed for f in failures[:8]]}")
    return 1 if found else 0


def _chunks(given: argparse.Namespace, started: float) -> Iterator[list[Program]]:
    if given.replay is not None:
        yield [draw(seed) for seed in given.replay]
        return
    seed, left = given.seed, given.count
    while time.monotonic() - started < given.seconds and left != 0:
        size = CHUNK if left is None else min(CHUNK, left)
        left = None if left is None else left - size
        programs = [draw(number) for number in range(seed, seed + size)]
        seed += size
        yield [p for p in programs if _is_wanted(p, given)]


def _is_wanted(program: Program, given: argparse.Namespace) -> bool:
    return (given.ranks is None or program.ranks in given.ranks) and (given.mode is None or program.mode in given.mode)


def _report(failure: Failure, runner: Runner, limit_s: float) -> None:
    print(f"\n=== seed {failure.program.seed}: {failure.signature}\n{failure.text[:1500]}", flush=True)
    if limit_s <= 0:
        return
    small = shrink(failure, runner.run_one, limit_s)
    print(f"--- shrunk to\n{small.program!r}\n{small.text[:800]}\n--- script\n{script_of(small)}\n---", flush=True)


if __name__ == "__main__":
    sys.exit(main())
