"""`phalanx top`: a run while it runs, for somebody who comes later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.console import bytes_in_words, console, visible
from phalanx.errors import ConfigError, PhalanxError, StateError
from phalanx.launch.elastic.history import tell
from phalanx.launch.elastic.story import Story
from phalanx.launch.records import status
from phalanx.launch.records.runs import RunInfo, newest
from phalanx.launch.records.status import RankStatus
from phalanx.launch.rundir import RunDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_REFRESH_S = 0.5
_NUM_EVENTS = 8  # the last ones of an elastic run that are shown


@click.command("top", short_help="Watch a run: ranks, step, rate, who waits for whom.")
@click.argument("run_dir", required=False)
@click.option("--once", is_flag=True, help="Print the state now and end; so it does where there is no terminal.")
@click.option("--runs", "parent", default="runs", metavar="DIR", help="Where runs are kept.")
def command(run_dir: str | None, once: bool, parent: str) -> int:
    """Watch RUN_DIR, or the newest run, from any terminal of its host, until it ends."""
    path = Path(run_dir) if run_dir else newest(parent).path
    directory = RunDirectory(path)
    if not path.is_dir() or not directory.facts():
        raise ConfigError(f"{path} is no run directory. `phalanx runs` lists those there are.")
    terminal = console()
    if once or not terminal.is_terminal:
        terminal.print(_seen(directory))
        return 0
    from rich.live import Live

    with Live(console=terminal, auto_refresh=False) as live:
        while True:
            live.update(_seen(directory), refresh=True)
            if not RunInfo(path, directory.facts(), 0.0).is_running:
                return 0
            time.sleep(_REFRESH_S)


def _seen(directory: RunDirectory) -> RenderableType:
    """The view, or what is wrong with the folder in words: it may be anybody's, and hold anything."""
    try:
        return view(directory)
    except PhalanxError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"{directory.root} is malformed: its record holds what no run writes ({type(error).__name__}: {error}). "
            "`phalanx runs` lists the runs there are."
        ) from error


def view(directory: RunDirectory) -> RenderableType:
    """One picture of a run: a line about all of it, one per rank, and what happened last if it is elastic."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    info = RunInfo(directory.root, directory.facts(), 0.0)
    story = tell(directory)
    ranks = status.read(directory, story)
    world = int(info.facts.get("nproc", 1)) * int((info.facts.get("nodes") or [1, 1])[1])
    head = Text(f"{visible(directory.root.name)}  ", style="bold")
    head.append(visible(info.state), style="green" if info.is_running or info.state == "finished" else "red")
    head.append(f"  {status.line(ranks, world, story)}")
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for title in ("rank", *(["worker", "pid"] if story else []), "step", "steps/s", "samples/s", "waiting", "memory"):
        table.add_column(title, justify="right")
    table.add_column("now")
    for one in ranks:
        rank, *figures = _row(one)
        table.add_row(rank, *_process(one, story), *figures, _now(one, ranks))
    return Group(head, table, *([] if story is None else _happened(story, info.facts.get("started_ns"))))


def _process(one: RankStatus, story: Story | None) -> list[str]:
    if story is None or one.worker is None:
        return []
    return [str(one.worker), str(story.pids.get(one.worker) or "")]


def _happened(story: Story, began_ns: object) -> list[Text]:
    """The last events, with when they were."""
    from rich.text import Text

    first = began_ns if isinstance(began_ns, int) else min((event.at_ns for event in story.events), default=0)
    shown = story.events[-_NUM_EVENTS:]
    left_out = len(story.events) - len(shown)
    lines = [Text(f"{left_out} more before", style="dim")] if left_out else []
    # As text, not as markup: what a file says may hold brackets.
    return lines + [Text.assemble((f"{(one.at_ns - first) / 1e9:9.1f} s  ", "dim"), visible(str(one))) for one in shown]


def _row(one: RankStatus) -> tuple[str, ...]:
    return (
        str(one.rank),
        str(one.step),
        f"{one.steps_per_s:.3g}",
        f"{one.samples_per_s:,.0f}" if one.samples_per_s else "",
        f"{one.waiting:.0%}",
        bytes_in_words(one.resident),
    )


def _now(one: RankStatus, ranks: list[RankStatus]) -> str:
    from rich.markup import escape

    state = escape(visible(one.state))
    if one.state == "ended":
        return "has ended"
    if one.silent_s:
        return f"[red]silent for {one.silent_s:.0f} s[/]"
    held_up = status.waited_for(ranks)
    if one.rank in held_up:
        return f"[yellow]{state} for {one.for_s:.0f} s; the others wait for it[/]"
    if held_up and one.state == "waiting":
        return f"waiting for rank {', '.join(map(str, held_up))} since {one.for_s:.0f} s"
    late = status.slowest(ranks)
    return "[yellow]the slowest[/]" if late is not None and late.rank == one.rank else state
