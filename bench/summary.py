"""The results of one day as one report: what is won, what is lost, and on what machine.

    python -m bench.summary [DATE]      writes bench/results/DATE/report.md from the JSON files in that folder

Without a date, the newest folder. `phalanx bench all` ends with it. Of the newest folder all lost rows are
also written into the README, between two marks; a test compares both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.table import RESULTS, Result, Row, shown

README = RESULTS.parents[1] / "README.md"
BEGIN, END = "<!-- what we lose: written by bench.summary -->", "<!-- end of what we lose -->"

# As they are read: the parts first, then what is made of them.
_ORDER = (
    *("collectives", "collectives-copy", "collectives-mpi", "ddp", "ddp-gloo", "zero", "compile", "compile-gloo", "remote"),
    *("hosts", "scaling", "tracing", "checkpoint", "elastic", "peers"),
)


def newest(folder: Path = RESULTS) -> Path | None:
    """The folder of the last day with results."""
    days = sorted(path for path in folder.glob("????-??-??") if any(path.glob("*.json")))
    return days[-1] if days else None


def read(day: Path) -> list[Result]:
    """All results of a day."""
    found = [Result.from_json(json.loads(path.read_text())) for path in sorted(day.glob("*.json"))]
    return sorted(found, key=lambda result: _ORDER.index(result.name) if result.name in _ORDER else len(_ORDER))


def write(results: list[Result], path: Path) -> Path:
    """The report as Markdown, with the pictures that lie beside it."""
    lines = [f"# Benchmarks, {path.parent.name}", "", *_overview(results)]
    for result in results:
        lines += _section(result, path.parent / f"{result.name}.svg")
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def _overview(results: list[Result]) -> list[str]:
    rows = [(result, row) for result in results for row in result.rows]
    lost = [(result, row) for result, row in rows if not row.wins]
    missed = [(result, row) for result, row in rows if row.wins and not row.keeps_target]
    best = sorted((pair for pair in rows if pair[1].wins and pair[1].keeps_target), key=lambda pair: pair[1].ratio)
    commits = sorted({result.machine["commit"] for result in results})
    lines = [
        f"**{len(rows) - len(lost)} of {len(rows)} comparisons won, {len(lost)} lost, {len(missed)} won but short of "
        "their target.** A ratio is the time of ours over that of theirs (or memory, or bytes), from rounds interleaved in "
        "one run: below 1 is better, everywhere. The spread is its middle half.",
        "",
    ]
    if len(commits) > 1:
        lines += [f"The results are of different commits: {', '.join(commits)}.", ""]
    lines += ["## What we lose", ""] + ([_item(*pair) for pair in lost] or ["Nothing in this run."]) + [""]
    if missed:
        lines += ["Ahead, but short of the target:", "", *(_item(*pair) for pair in missed), ""]
    lines += ["## What we win by most", "", *(_item(*pair) for pair in best[:8]), ""]
    return lines


def _item(result: Result, row: Row) -> str:
    target = "" if row.target is None else f", target ≤ {row.target:.2g}"
    return f"- {result.name}, {row.case}: {row.shown_ratio} × {result.theirs}{target}"


def _section(result: Result, picture: Path) -> list[str]:
    machine = result.machine
    return [
        f"## {result.name}",
        "",
        result.question,
        "",
        f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"torch {machine['torch']}, commit {machine['commit']}, {machine['date']}.",
        "",
        *([f"![{result.name}]({picture.name})", ""] if picture.exists() else []),
        f"| | {result.ours} | {result.theirs} | ratio | spread | target | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *(_line(row) for row in result.rows),
        "",
        *(f"- {note}" for note in result.notes),
        *([""] if result.notes else []),
    ]


def _line(row: Row) -> str:
    target = "" if row.target is None else f"≤ {row.target:.2g}"
    verdict = "won" if row.wins else "**lost**"
    if row.target is not None and not row.keeps_target:
        verdict += ", **target missed**"
    if row.note:
        verdict += f"; {row.note}"
    return (
        f"| {row.case} | {row.ours:.3g} {row.unit} | {row.theirs:.3g} {row.unit} | {row.shown_ratio} "
        f"| {shown(row.low)}-{shown(row.high)} | {target} | {verdict} |"
    )


def losses_table(results: list[Result]) -> str:
    """Every lost row, as a table for the README."""
    rows = [(result, row) for result in results for row in result.rows if not row.wins]
    lines = [f"| {result.name} | {row.case} | {row.shown_ratio} × {result.theirs} |" for result, row in rows]
    return "\n".join(["| benchmark | case | ratio |", "| --- | --- | ---: |", *lines])


def with_losses(readme: str, results: list[Result]) -> str:
    """The README's text with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{losses_table(results)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="one day's results as a report")
    parser.add_argument("date", nargs="?", help="YYYY-MM-DD; the newest by default")
    parsed = parser.parse_args()
    day = RESULTS / parsed.date if parsed.date else newest()
    if day is None or not any(day.glob("*.json")):
        raise SystemExit(f"no results in {day or RESULTS}; run `phalanx bench all` first")
    results = read(day)
    print(write(results, day / "report.md"))
    if day == newest():
        README.write_text(with_losses(README.read_text(), results))
        print(README)


if __name__ == "__main__":
    main()
