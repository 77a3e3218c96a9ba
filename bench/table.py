"""A benchmark's result: as a table on the terminal, as JSON, and as a plot. Losing rows are red.

Every benchmark fills a `Result` and calls `present`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"


@dataclass
class Row:
    """One comparison. `ratio` is the time of ours over that of theirs (or memory, or bytes): below 1 is a win, always."""

    case: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    unit: str = "ms"
    target: float | None = None
    """The ratio that was promised: at most this."""
    note: str = ""

    @staticmethod
    def of_rates(case: str, ours: float, theirs: float, faster: tuple[float, float, float], **others: Any) -> Row:
        """A row whose figures are rates, of which more is better; `faster` says how many times ours is, and its spread."""
        median, low, high = faster
        return Row(case, ours, theirs, 1 / median, 1 / high, 1 / low, unit="/s", **others)

    @property
    def wins(self) -> bool:
        """Ahead of the other side, or even as far as the ratio is printed."""
        return self.keeps(1.0)

    @property
    def keeps_target(self) -> bool:
        return self.target is None or self.keeps(self.target)

    def keeps(self, limit: float) -> bool:
        """Whether the ratio, as it is printed, is on the right side of `limit`."""
        return float(self.shown_ratio) <= float(shown(limit))

    @property
    def shown_ratio(self) -> str:
        return shown(self.ratio)


def shown(ratio: float) -> str:
    """`shown(0.642) == "0.64"`, and a third digit where two would say little: `shown(0.0117) == "0.012"`."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


@dataclass
class Result:
    """One benchmark's rows, and all that is needed to judge or repeat them."""

    name: str
    question: str
    ours: str
    theirs: str
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Result:
        rows = [Row(**_as_time(row)) for row in value["rows"]]
        return Result(**{**value, "rows": rows})


def _as_time(row: dict[str, Any]) -> dict[str, Any]:
    """Results kept before all ratios had one direction: some said how many times faster ours was."""
    old = dict(row)
    if old.pop("higher_is_better", False):
        old |= {"ratio": 1 / row["ratio"], "low": 1 / row["high"], "high": 1 / row["low"]}
        old["target"] = None if row["target"] is None else 1 / row["target"]
    return old


def machine() -> dict[str, Any]:
    """Hardware, versions, commit and command."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join([f"python -m bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _console() -> Console:
    console = Console(highlight=False)
    # A file or a pipe has no width; rows should not break there.
    return console if console.is_terminal else Console(highlight=False, width=140)


def show(result: Result, console: Console | None = None) -> None:
    """Print the table."""
    console = console or _console()
    hardware = result.machine
    console.print(f"\n[bold]{result.name}[/]: {result.question}")
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    for title in (result.ours, result.theirs, "ratio", "spread", "target"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in result.rows:
        style = "red" if not row.wins or not row.keeps_target else "green"
        table.add_row(
            row.case,
            f"{row.ours:.3g} {row.unit}",
            f"{row.theirs:.3g} {row.unit}",
            f"[{style}]{row.shown_ratio}[/]",
            f"{shown(row.low)}-{shown(row.high)}",
            "" if row.target is None else f"≤ {row.target:.2g}",
            row.note,
        )
    console.print(table)
    for note in result.notes:
        console.print(f"[dim]{note}[/]")
    console.print(
        f"[dim]{hardware['cpu']}, {hardware['cores']} cores, torch {hardware['torch']}, "
        f"commit {hardware['commit']}, {hardware['date']}[/]"
    )


def save(result: Result, folder: Path | None = None) -> Path:
    """Write the result as JSON under the day's folder; a later run of a day replaces it."""
    folder = folder or RESULTS / result.machine["date"].split(" ")[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return path


def options(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast")
    parser.add_argument("--no-save", action="store_true", help="only print")
    return parser


def present(result: Result, parsed: argparse.Namespace) -> None:
    """Print the result, and keep it unless it was a quick look."""
    show(result)
    if parsed.no_save or parsed.quick:
        return
    # The picture is made of results; it comes here only when one is shown.
    from bench.plot import draw

    path = save(result)
    drawn = draw(result, path.with_suffix(".svg"))
    _console().print(f"[dim]kept in {path} and {drawn}[/]")
