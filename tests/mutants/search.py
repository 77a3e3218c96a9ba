"""`python -m tests.mutants.search`, in a copy with a mistake in it: which programs of the fuzzer notice?

As `python -m tests.fuzz`, in small batches: what is looked for is one failure, soon, and not all there are.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

from tests.fuzz.program import Program
from tests.fuzz.runner import Runner
from tests.fuzz.traits import words_of
from tests.fuzz.wider import draw, seeds_from

BATCH = 5


def batches(programs: Iterable[Program]) -> Iterator[list[Program]]:
    """Programs that can share a group, a few at a time, those for few ranks first: they take the least time."""
    alike = lambda program: (program.ranks > 2, program.ranks, program.backend)  # noqa: E731
    groups = [list(group) for _, group in itertools.groupby(sorted(programs, key=alike), alike)]
    # By turns: what a mistake in one backend needs is not behind all programs of the other.
    for start in range(0, max(map(len, groups), default=0), BATCH):
        yield from (group[start : start + BATCH] for group in groups if group[start:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.search", description=__doc__)
    parser.add_argument("--replay", type=int, nargs="*", default=None, help="all of these seeds and no others")
    parser.add_argument("--with", nargs="*", default=(), dest="words", help="programs with these words (traits.py)")
    parser.add_argument("--programs", type=int, default=60, help="at most so many, until one fails")
    parser.add_argument("--skip", type=int, nargs="*", default=(), help="not these seeds")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        programs = [draw(seed) for seed in given.replay]
    else:
        drawn = (draw(seed) for seed in seeds_from(0) if seed not in given.skip)
        fitting = (program for program in drawn if words_of(program).issuperset(given.words))
        programs = list(itertools.islice(fitting, given.programs))
    failed = False
    with Runner() as runner:
        for batch in batches(programs):
            for program, failure in runner.run(batch):
                if failure is not None:
                    print(f"=== seed {program.seed}: {failure.signature}", flush=True)
                    failed = True
            if failed and given.replay is None:
                break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
