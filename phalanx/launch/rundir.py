"""The layout of a run directory: where each rank's logs, failure, stacks and trace lie.

    runs/20261115-204211-train/
      run.json                       what was run, where, when, and how it ended
      attempt-0/                     one a start; the elastic agent may restart
        rank-00000/stdout.log  stderr.log  error.json  stacks.txt
        trace-rank00000.jsonl        with tracing on

Owns paths and `run.json`; knows nothing of what the files hold.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, StateError

FACTS = "run.json"


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in one attempt."""

    directory: Path

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"

    @property
    def error(self) -> Path:
        return self.directory / "error.json"

    @property
    def stacks(self) -> Path:
        return self.directory / "stacks.txt"


class RunDirectory:
    """One run's directory. Creating it makes the folder; reading an existing one changes nothing."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @staticmethod
    def create(parent: str | os.PathLike[str], name: str) -> RunDirectory:
        """A new directory under `parent`, named after the time and `name`; unique even within a second."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
        for number in range(1000):
            root = Path(parent) / (stem if number == 0 else f"{stem}-{number}")
            try:
                root.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot create a run directory under {parent}: {error}") from None
            return RunDirectory(root)
        raise ConfigError(f"a thousand runs named {stem} exist already under {parent}")

    def attempt(self, number: int) -> Path:
        """The folder of the `number`-th start, counted from 0."""
        return self.root / f"attempt-{number}"

    def rank(self, attempt: int, rank: int) -> RankFiles:
        """The files of one rank; its folder exists afterwards."""
        directory = self.attempt(attempt) / f"rank-{rank:05d}"
        directory.mkdir(parents=True, exist_ok=True)
        return RankFiles(directory)

    def last_attempt(self) -> Path | None:
        """The folder of the latest start, or None when nothing was started here."""
        attempts = [path for path in self.root.glob("attempt-*") if path.name[8:].isdigit()]
        return max(attempts, key=lambda path: int(path.name[8:]), default=None)

    def facts(self) -> dict[str, Any]:
        """What `run.json` holds; empty when the directory has none."""
        try:
            facts = json.loads((self.root / FACTS).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StateError(f"{self.root / FACTS} cannot be read: {error}") from None
        if not isinstance(facts, dict):
            raise StateError(f"{self.root / FACTS} should hold an object, it holds {type(facts).__name__}")
        return facts

    def record(self, **facts: Any) -> None:
        """Add to `run.json`. Replaced in one move, so a reader never sees half of it."""
        merged = self.facts() | facts
        fresh = self.root / f".{FACTS}.{os.getpid()}"
        fresh.write_text(json.dumps(merged, indent=2, default=str) + "\n")
        fresh.replace(self.root / FACTS)
