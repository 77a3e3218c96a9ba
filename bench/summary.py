"""The results of one day as one report: what is won, what is lost, and on what machine.

    python -m bench.summary [DATE]      writes bench/results/DATE/report.md from the JSON files in that folder

Without a date, the newest folder. `phalanx bench all` ends with it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.table import RESULTS, Result, Row

# As they are read: the parts first, then what is made of them.
_ORDER = (
    *("collectives", "collectives-copy", "collectives-mpi", "ddp", "ddp-gloo", "zero", "compile", "compile-gloo", "remote"),
    *("hosts", "scaling", "tracing", "checkpoint", "peers"),
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
    best = sorted((pair for pair in rows if pair[1].wins and pair[1].keeps_target), key=lambda pair: _gain(pair[1]))
    commits = sorted({result.machine["commit"] for result in results})
    lines = [
        f"**{len(rows) - len(lost)} of {len(rows)} comparisons won, {len(lost)} lost, {len(missed)} won but short of "
        "their target.** A ratio is ours over theirs, from rounds interleaved in one run; the spread is its middle half.",
        "",
    ]
    if len(commits) > 1:
        lines += [f"The results are of different commits: {', '.join(commits)}.", ""]
    lines += ["## What we lose", ""] + ([_item(*pair) for pair in lost] or ["Nothing in this run."]) + [""]
    if missed:
        lines += ["Ahead, but short of the target:", "", *(_item(*pair) for pair in missed), ""]
    lines += ["## What we win by most", "", *(_item(*pair) for pair in best[:8]), ""]
    return lines


def _gain(row: Row) -> float:
    return 1 / row.ratio if row.higher_is_better and row.ratio else row.ratio


def _item(result: Result, row: Row) -> str:
    sign = "≥" if row.higher_is_better else "≤"
    target = "" if row.target is None else f", target {sign} {row.target:.2g}"
    return f"- {result.name}, {row.case}: {row.ratio:.2f} × {result.theirs}{target}"


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
    target = "" if row.target is None else f"{'≥' if row.higher_is_better else '≤'} {row.target:.2g}"
    verdict = "won" if row.wins else "**lost**"
    if row.target is not None and not row.keeps_target:
        verdict += ", **target missed**"
    if row.note:
        verdict += f"; {row.note}"
    return (
        f"| {row.case} | {row.ours:.3g} {row.unit} | {row.theirs:.3g} {row.unit} | {row.ratio:.2f} "
        f"| {row.low:.2f}-{row.high:.2f} | {target} | {verdict} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="one day's results as a report")
    parser.add_argument("date", nargs="?", help="YYYY-MM-DD; the newest by default")
    parsed = parser.parse_args()
    day = RESULTS / parsed.date if parsed.date else newest()
    if day is None or not any(day.glob("*.json")):
        raise SystemExit(f"no results in {day or RESULTS}; run `phalanx bench all` first")
    print(write(read(day), day / "report.md"))


if __name__ == "__main__":
    main()
