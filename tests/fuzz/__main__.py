"""`python -m tests.fuzz`: programs from one seed on, for as long as it is given, and what failed, kind by kind."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.fuzz.program import Program
from tests.fuzz.runner import Failure, Runner
from tests.fuzz.script import script_of
from tests.fuzz.shrink import shrink
from tests.fuzz.traits import words_of
from tests.fuzz.wider import draw, seeds_from

# Drawn together, so that programs for the same ranks and backend fill a batch.
CHUNK = 160


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on drawing programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--count", type=int, default=None, help="at most so many programs")
    parser.add_argument("--ranks", type=int, nargs="*", default=None, help="only programs for so many ranks")
    parser.add_argument("--programs", type=int, default=None, help="stop after so many programs that were wanted")
    parser.add_argument("--with", nargs="*", default=(), dest="words", help="only programs with these words (traits.py)")
    parser.add_argument("--skip", type=int, nargs="*", default=(), help="not these seeds")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--every", action="store_true", help="name every failing seed, not only the first of each kind")
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
                    if given.every or len(found[failure.signature]) == 1:
                        _report(failure, runner, given.shrink_seconds if len(found) <= given.most_kinds else 0.0)
                    if given.first:
                        return 1
            took = time.monotonic() - started
            print(f"{count} programs in {took:.0f} s, {sum(map(len, found.values()))} failed", flush=True)
    for signature, failures in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(failures):4} × {signature}   seeds {[f.program.seed for f in failures[:8]]}")
    return 1 if found else 0


def _chunks(given: argparse.Namespace, started: float) -> Iterator[list[Program]]:
    if given.replay is not None:
        yield [draw(seed) for seed in given.replay]
        return
    seeds = seeds_from(given.seed) if given.count is None else iter(range(given.seed, given.seed + given.count))
    wanted = (program for program in map(draw, seeds) if _is_wanted(program, given))
    wanted = itertools.islice(wanted, given.programs)
    while time.monotonic() - started < given.seconds and (chunk := list(itertools.islice(wanted, CHUNK))):
        # Counted among the programs all the same: with and without skipping, no others are run.
        yield [program for program in chunk if program.seed not in given.skip]


def _is_wanted(program: Program, given: argparse.Namespace) -> bool:
    fits = given.ranks is None or program.ranks in given.ranks
    return fits and words_of(program).issuperset(given.words)


def _report(failure: Failure, runner: Runner, limit_s: float) -> None:
    print(f"\n=== seed {failure.program.seed}: {failure.signature}\n{failure.text[:1500]}", flush=True)
    if limit_s <= 0:
        return
    small = shrink(failure, runner.run_one, limit_s)
    print(f"--- shrunk to\n{small.program!r}\n{small.text[:800]}", flush=True)
    print(f"--- script\n{script_of(small)}\n---", flush=True)


if __name__ == "__main__":
    sys.exit(main())
