"""`python -m tests.mutants`: makes each mutation in a scratch copy, runs what should notice, and says what did."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTATIONS, Mutation, Unmatched, mutated

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("phalanx", "tests", "bench", "examples", "pyproject.toml", "README.md")
# Programs of the fuzzer that come past the line, for one mutation.
PROGRAMS = 60


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation. `noticed` says by whom, or None."""

    mutation: Mutation
    noticed: str | None
    seconds: float


class Scratch:
    """A copy of the repository in which mistakes are made. The tree itself is never touched."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self._failing: dict[tuple[str, ...], list[str]] = {}
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            elif source.exists():
                shutil.copy(source, folder / name)

    def try_out(self, mutation: Mutation) -> Outcome:
        """Make the mistake, run fuzzer and tests until one notices, and take it back."""
        path, started = self.folder / mutation.file, time.monotonic()
        # Before the mistake is made: a program that fails anyway would seem to notice it.
        skipped = self._failing_programs(mutation.words)
        original = path.read_text()
        path.write_text(mutated(mutation, original))
        try:
            noticed = self._by_fuzzer(mutation.words, skipped) or self._by_tests(mutation.tests)
        finally:
            path.write_text(original)
        return Outcome(mutation, noticed, time.monotonic() - started)

    def _failing_programs(self, words: tuple[str, ...]) -> list[str]:
        if words not in self._failing:
            output = self._run(_fuzz_command(words, [], first=False))[1]
            self._failing[words] = re.findall(r"^=== seed (\d+)", output, re.MULTILINE)
            if self._failing[words]:
                print(f"note: without any mutation, seeds {' '.join(self._failing[words])} fail and are left out")
        return self._failing[words]

    def _by_fuzzer(self, words: tuple[str, ...], skipped: Sequence[str]) -> str | None:
        code, output = self._run(_fuzz_command(words, skipped, first=True))
        if code == 0:
            return None
        found = re.search(r"^=== (seed .*)", output, re.MULTILINE)
        return found.group(1)[:100] if found else f"the fuzzer ended with exit code {code}"

    def _by_tests(self, files: Sequence[str]) -> str | None:
        for file in files:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", file]
            code, output = self._run(command)
            if code != 0:
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return found.group(1) if found else f"{file} ended with exit code {code}"
        return None

    def _run(self, command: Sequence[str]) -> tuple[int, str]:
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # A group of its own, so that a time limit ends the ranks with the process that started them.
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, process.communicate()[0]
        return process.returncode, output


def _fuzz_command(words: Sequence[str], skipped: Sequence[str], first: bool) -> list[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--programs", str(PROGRAMS), "--seconds", "100000"]
    command += ["--shrink-seconds", "0", "--every"]
    command += ["--with", *words] if words else []
    command += ["--skip", *skipped] if skipped else []
    return [*command, "--first"] if first else command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all mutations if none is given")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run of the fuzzer or of a test file")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if not given.names or any(name in m.name for name in given.names)]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        scratch = Scratch(Path(folder), given.limit)
        for mutation in chosen:
            try:
                outcome = scratch.try_out(mutation)
            except Unmatched as error:
                bad += 1
                print(f"BROKEN  {error}", flush=True)
                continue
            bad += outcome.noticed is None
            verdict = "MISSED " if outcome.noticed is None else "caught "
            by = "" if outcome.noticed is None else f"   by {outcome.noticed}"
            print(f"{verdict} {mutation.name} ({outcome.seconds:.0f} s){by}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutations caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
