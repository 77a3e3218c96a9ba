"""`phalanx doctor`: this machine's answers, then two workers that really train."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING

import click

from phalanx.cli.console import console, importing
from phalanx.launch.rundir import RunDirectory

if TYPE_CHECKING:
    from phalanx.launch.machine import Answer

# By the value of a `machine.Level`.
_SIGNS = {"good": "[green]✔[/]", "note": "[yellow]•[/]", "bad": "[bold red]✘[/]"}


@click.command("doctor", short_help="Check this machine, with a remedy for everything that is wrong.")
@click.option("--no-self-test", is_flag=True, help="Only look; start no workers.")
def command(no_self_test: bool) -> int:
    """Check this machine and run a two-rank self-test. Exit code 1 when something is wrong."""
    with importing():
        from phalanx.launch.machine import Level, examine
    answers = examine()
    _show(answers)
    if not no_self_test:
        with console().status("starting two workers that sum and train"):
            answers.append(self_test())
        _show(answers[-1:])
    wrong = sum(answer.level is Level.BAD for answer in answers)
    if wrong:
        console().print(f"\n[bold red]{wrong} of {len(answers)} need attention.[/]")
        return 1
    console().print("\n[green]This machine is ready.[/] Try: phalanx demo")
    return 0


def self_test() -> Answer:
    """Two workers meet, sum and train; what went wrong, in the failing worker's own words, if it did."""
    from phalanx.launch.agent import LaunchSettings, launch
    from phalanx.launch.machine import Answer, Level

    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder:
        settings = LaunchSettings(("--module", "phalanx.cli.selftest"), nproc=2)
        outcome = launch(settings, RunDirectory(folder), lambda rank, stream, line: lines.append(line))
    if outcome.failure is not None:
        first = outcome.failure.first
        remedy = "Fix the lines above, then see: phalanx run -n 2 --module phalanx.cli.selftest"
        return Answer("self-test", Level.BAD, f"rank {first.rank} failed: {first.message}", remedy)
    if outcome.signal is not None:
        return Answer("self-test", Level.BAD, f"ended by {outcome.signal.name}", "Start it again.")
    found = next((json.loads(line) for line in lines if line.startswith('{"backend"')), None)
    if found is None:
        return Answer("self-test", Level.BAD, "the workers said nothing", "Report this as a bug.")
    return Answer(
        "self-test",
        Level.GOOD,
        f"2 workers on {found['backend']} trained and agree; 1 MB summed in {found['seconds'] * 1e3:.2f} ms",
    )


def _show(answers: list[Answer]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(min_width=14, style="bold")
    table.add_column()
    for answer in answers:
        remedy = f"\n[red]→ {answer.remedy}[/]" if answer.remedy else ""
        table.add_row(_SIGNS[answer.level.value], answer.topic, answer.text + remedy)
    console().print(table)
