"""`python -m tests.mutants`: makes each mutation in a scratch copy, runs what should notice, and says what did.

What noticed last time is in caught.json and is tried first; `--learn` brings it up to date. If it no longer does, the
mutation's own tests are run, then programs of the fuzzer that have the mutation's words.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTATIONS
from tests.mutants.mutation import Mutation, Unmatched
from tests.mutants.scratch import SEED, Pristine, Scratch

CAUGHT = Path(__file__).with_name("caught.json")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation: who noticed, or None; `broken` says why it could not be made."""

    mutation: Mutation
    noticed: str | None
    seconds: float
    broken: str | None = None

    def __str__(self) -> str:
        if self.broken is not None:
            return f"BROKEN  {self.broken}"
        if self.noticed is None:
            return f"MISSED  {self.mutation.name} ({self.seconds:.0f} s)"
        return f"caught  {self.mutation.name} ({self.seconds:.0f} s)   by {self.noticed}"


class Trial:
    """Tries mutations out, several at a time, each in a copy of its own."""

    def __init__(self, folder: Path, jobs: int, programs: int, limit_s: float) -> None:
        self.programs = programs
        self.known: dict[str, list[str]] = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
        self._copies = [Scratch(folder / str(number), limit_s) for number in range(jobs + 1)]
        self.pristine = Pristine(self._copies[-1])
        self._free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        for scratch in self._copies[:-1]:
            self._free.put(scratch)

    def try_out(self, mutation: Mutation) -> Outcome:
        """Make the mistake, run what should notice until something does, and take it back."""
        scratch, started = self._free.get(), time.monotonic()
        try:
            with scratch.mistaken(mutation):
                noticed = self._known(scratch, mutation) or self._tests(scratch, mutation) or self._fuzzer(scratch, mutation)
            return Outcome(mutation, noticed, time.monotonic() - started)
        except Unmatched as error:
            return Outcome(mutation, None, 0.0, str(error))
        finally:
            self._free.put(scratch)

    def stop(self) -> None:
        """End everything that runs."""
        for scratch in self._copies:
            scratch.stop()

    def _known(self, scratch: Scratch, mutation: Mutation) -> str | None:
        for catcher in self.known.get(mutation.name, ()):
            if self.pristine.is_healthy(catcher):
                seeds = [int(catcher.removeprefix(SEED))] if catcher.startswith(SEED) else []
                if scratch.replay(seeds) if seeds else scratch.test([catcher]):
                    return catcher
        return None

    def _tests(self, scratch: Scratch, mutation: Mutation) -> str | None:
        for path in mutation.test_paths:
            if failed := scratch.test([path], self.pristine.failing_in(path)):
                return failed[0]
        return None

    def _fuzzer(self, scratch: Scratch, mutation: Mutation) -> str | None:
        while True:
            skipped = [catcher for catcher in self.pristine.failing if catcher.startswith(SEED)]
            seed = scratch.search(mutation.words, skipped, self.programs) if self.programs else None
            if seed is None or self.pristine.is_healthy(seed):
                return seed


def run(trial: Trial, chosen: Sequence[Mutation], jobs: int, learns: bool) -> list[Outcome]:
    """All of them, telling of each as it is known; with `learns`, what noticed is written down."""
    trial.pristine.learn([catcher for mutation in chosen for catcher in trial.known.get(mutation.name, ())])
    for catcher in trial.pristine.failing:
        print(f"note: fails without any mutation and is left out: {catcher}", flush=True)
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(trial.try_out, mutation) for mutation in chosen]):
                outcomes.append(done.result())
                print(outcomes[-1], flush=True)
                if learns:
                    write_down(outcomes, trial.known)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            trial.stop()
            raise
    return outcomes


def write_down(outcomes: Sequence[Outcome], known: dict[str, list[str]]) -> None:
    """Remember what noticed, in the order of the catalogue."""
    found = known | {outcome.mutation.name: [outcome.noticed] for outcome in outcomes if outcome.noticed}
    kept = {mutation.name: found[mutation.name] for mutation in MUTATIONS if mutation.name in found}
    CAUGHT.write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all mutations if none is given")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one run of the fuzzer or of a test file")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--programs", type=int, default=60, help="of the fuzzer, where nothing known catches")
    parser.add_argument("--learn", action="store_true", help="write down what noticed")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what was started is stopped
    chosen = [m for m in MUTATIONS if not given.names or any(name in m.name for name in given.names)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        trial = Trial(Path(folder), given.jobs, given.programs, given.limit)
        outcomes = run(trial, chosen, given.jobs, given.learn)
    caught = sum(outcome.noticed is not None for outcome in outcomes)
    print(f"{caught} of {len(chosen)} mutations caught, in {time.monotonic() - started:.0f} s")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
