"""A copy of the repository in which mistakes are made, and what runs there. The tree itself is never touched."""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutation import Mutation, mutated

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "bench", "examples", "pyproject.toml", "README.md")
SEED = "seed "
TIMED_OUT = 124


class Scratch:
    """One copy. `limit_s` is for one run of the fuzzer or of pytest."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self._process: subprocess.Popen[str] | None = None
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            elif source.exists():
                shutil.copy(source, folder / name)
        # Found valid by what is in a source, not by its time and size: a mistake of the same length, made within a second,
        # would go on as the code before it. Without these every process would compile the package and the tests.
        compileall.compile_dir(folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    @contextmanager
    def mistaken(self, mutation: Mutation) -> Iterator[None]:
        """Inside, the mistake is made."""
        path = self.folder / mutation.file
        original = path.read_text()
        path.write_text(mutated(mutation, original))
        try:
            yield
        finally:
            path.write_text(original)

    def replay(self, seeds: Sequence[int]) -> list[str]:
        """Those of these programs of the fuzzer that fail, as "seed 17"."""
        if not seeds:
            return []
        return self._search("--replay", *map(str, seeds))

    def search(self, words: str, skipped: Iterable[str], programs: int) -> str | None:
        """The first program with these words that fails, as "seed 17"."""
        seeds = [seed.removeprefix(SEED) for seed in skipped]
        found = self._search("--programs", str(programs), "--with", *words.split(), "--skip", *seeds)
        return found[0] if found else None

    def test(self, paths: Sequence[str], deselected: Iterable[str] = (), first: bool = True) -> list[str]:
        """Those of these tests that fail; with `first`, no more than one."""
        if not paths:
            return []
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", *(["-x"] if first else []), *paths]
        for node in deselected:
            command += ["--deselect", node]
        code, output = self._run(command)
        # 5: nothing is left to run.
        if code in (0, 5):
            return []
        found = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
        return found or list(paths[:1])  # ended without saying which, as by a time limit

    def _search(self, *arguments: str) -> list[str]:
        output = self._run([sys.executable, "-m", "tests.mutants.search", *arguments])[1]
        return re.findall(r"^=== (seed \d+)", output, re.MULTILINE)

    def _run(self, command: Sequence[str]) -> tuple[int, str]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(self.folder)]),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # A group of its own, so that a time limit ends the ranks with the process that started them.
        process = self._process = subprocess.Popen(
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
            self.stop()
            return TIMED_OUT, process.communicate()[0]
        return process.returncode, output

    def stop(self) -> None:
        """End what runs here, with every process that it started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


class Pristine:
    """A copy without any mistake: what fails here has noticed nothing."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._lock = threading.Lock()
        self._healthy: dict[str, bool] = {}
        self._failing: dict[str, list[str]] = {}  # by path of tests

    @property
    def failing(self) -> list[str]:
        """Seeds and tests that are known to fail without a mistake."""
        return [catcher for catcher, healthy in self._healthy.items() if not healthy]

    def failing_in(self, path: str) -> list[str]:
        """The tests of this file that fail without a mistake."""
        with self._lock:
            if path not in self._failing:
                self._failing[path] = self._scratch.test([path], first=False)
            return self._failing[path]

    def learn(self, catchers: Sequence[str]) -> None:
        """Find out about all of these at once: seeds in one run, tests in another."""
        with self._lock:
            unknown = [catcher for catcher in dict.fromkeys(catchers) if catcher not in self._healthy]
            seeds = [int(catcher.removeprefix(SEED)) for catcher in unknown if catcher.startswith(SEED)]
            tests = [catcher for catcher in unknown if not catcher.startswith(SEED)]
            failed = {*self._scratch.replay(seeds), *self._scratch.test(tests, first=False)}
            self._healthy |= {catcher: catcher not in failed for catcher in unknown}

    def is_healthy(self, catcher: str) -> bool:
        """Whether this seed or test passes as long as nothing is mutated."""
        self.learn([catcher])
        return self._healthy[catcher]
