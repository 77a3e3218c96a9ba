"""`phalanx doctor`: this machine's answers, then two workers that really train, on GPUs too where there are two."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.console import console, importing, visible
from phalanx.launch.rundir import RunDirectory

if TYPE_CHECKING:
    from phalanx.launch.machine import Answer

# By the value of a `machine.Level`.
_SIGNS = {"good": "[green]✔[/]", "note": "[yellow]•[/]", "bad": "[bold red]✘[/]"}


@click.command("doctor", short_help="Check this machine, with a remedy for everything that is wrong.")
@click.option("--no-self-test", is_flag=True, help="Only look; start no workers.")
def command(no_self_test: bool) -> int:
    """Check this machine and run a two-rank self-test, and another on two GPUs where there are two. Exit code 1 when
    something is wrong."""
    with importing():
        from phalanx.launch.machine import Level, examine
    answers = examine()
    _show(answers)
    if not no_self_test:
        for what, test in (("sum and train", self_test), ("train on a GPU each", device_self_test)):
            with console().status(f"starting two workers that {what}"):
                answers.append(test())
            _show(answers[-1:])
    wrong = sum(answer.level is Level.BAD for answer in answers)
    if wrong:
        console().print(f"\n[bold red]{wrong} of {len(answers)} need attention.[/]")
        return 1
    console().print("\n[green]This machine is ready.[/] Try: phalanx demo")
    return 0


def self_test() -> Answer:
    """Two workers meet, sum and train; what went wrong, in the failing worker's own words, if it did."""
    from phalanx.launch.machine import Answer, Level

    found = _run("self-test", "phalanx.cli.selftest.host")
    if isinstance(found, Answer):
        return found
    text = f"2 workers on {found['backend']} trained and agree; 1 MB summed in {found['seconds'] * 1e3:.2f} ms"
    return Answer("self-test", Level.GOOD, text)


def device_self_test() -> Answer:
    """Two workers train on a device each, in every way of reducing; a note where there are not two devices."""
    from phalanx.launch.machine import Answer, Level, num_devices

    if num_devices() < 2:
        return Answer("GPU self-test", Level.NOTE, f"not run: it needs two GPUs, this machine has {num_devices()}")
    found = _run("GPU self-test", "phalanx.cli.selftest.device")
    if isinstance(found, Answer):
        return found
    differences = found["differences"]
    waits = "no steady step waited for the device" if found["watched"] else "whether steps wait for it cannot be told"
    text = (
        f"2 workers on {found['backend']} trained in {len(differences)} ways like one process, off by at most "
        f"{max(differences.values()):.1e}; {waits}; {found['seconds']:.0f} s"
    )
    return Answer("GPU self-test", Level.GOOD, text)


def _run(topic: str, module: str) -> Answer | dict[str, Any]:
    """What rank 0 of two workers that run `module` says, or the answer for their failure."""
    from phalanx.launch.agent import LaunchSettings, launch
    from phalanx.launch.machine import Answer, Level

    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder:
        settings = LaunchSettings(("--module", module), nproc=2)
        outcome = launch(settings, RunDirectory(folder), lambda rank, stream, line: lines.append(line))
    if outcome.failure is not None:
        first = outcome.failure.first
        remedy = f"Fix the lines above, then see: phalanx run -n 2 --module {module}"
        return Answer(topic, Level.BAD, f"rank {first.rank} failed: {first.message}", remedy)
    if outcome.signal is not None:
        return Answer(topic, Level.BAD, f"ended by {outcome.signal.name}", "Start it again.")
    said = next((json.loads(line) for line in lines if line.startswith("{") and '"backend"' in line), None)
    if said is None:
        return Answer(topic, Level.BAD, "the workers said nothing", "Report this as a bug.")
    return dict(said)


def _show(answers: list[Answer]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(min_width=14, style="bold")
    table.add_column()
    for answer in answers:
        # Both hold what others say: a variable's value, a worker's last words.
        text, remedy = (escape(visible(words)) for words in (answer.text, answer.remedy))
        table.add_row(_SIGNS[answer.level.value], answer.topic, text + (f"\n[red]→ {remedy}[/]" if remedy else ""))
    console().print(table)
