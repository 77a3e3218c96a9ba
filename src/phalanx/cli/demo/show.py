"""`phalanx demo`: start two workers, show their training live, and say what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from phalanx.cli.console import bytes_in_words, console, say
from phalanx.cli.demo.settings import Settings
from phalanx.cli.demo.train import MARK, as_argument
from phalanx.cli.run import show_failure
from phalanx.launch.agent import LaunchSettings, launch
from phalanx.launch.rundir import RunDirectory
from phalanx.observe import report
from phalanx.observe.live.follow import RecentTraces
from phalanx.observe.run import Run, load
from phalanx.observe.stats import SMOOTHED_STEPS, hidden_share, loss_progress, tokens_per_s

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 10.0
_LOOK_EVERY_S = 2.0


@dataclass
class Story:
    """What the workers have told so far. Updated from the log follower's thread, read by the display's."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: dict[int, dict[str, Any]] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    sample: str = ""
    other_lines: list[str] = field(default_factory=list)

    def hear(self, rank: int, stream: str, line: str) -> None:
        """A line of a worker; one that is not for the display is kept for a failure's sake."""
        if not line.startswith(MARK):
            self.other_lines.append(line)
            return
        facts = json.loads(line.removeprefix(MARK))
        event = facts["event"]
        if event == "start":
            self.starts[rank] = facts
        elif event == "step":
            self.steps[rank] = facts
            if rank == 0:
                # The mean of the ranks, as in the report; each gives the mean of its last steps.
                self.losses.append(sum(one["loss"] for one in self.steps.values()) / len(self.steps))
        elif event == "end":
            self.ends[rank] = facts
        elif event == "sample":
            self.sample = facts["text"]

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done by rank 0, and steps in all."""
        facts = self.steps.get(0)
        return (facts["step"], facts["num_steps"]) if facts else (0, 1)


def spark_line(values: list[float], width: int) -> str:
    """A curve in one line of text, thinned to `width` characters."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


class Display:
    """The live view: a progress bar, the loss curve, and a line a rank."""

    def __init__(self, story: Story, traces: RecentTraces) -> None:
        self.story = story
        self._traces = traces
        self._hidden: dict[int, float | None] = {}
        self._looked = 0.0
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            TextColumn("step {task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            expand=True,
        )
        self._task = self._progress.add_task("training", total=1)

    def __rich__(self) -> RenderableType:
        done, total = self.story.progress
        self._progress.update(self._task, completed=done, total=total)
        loss = Text("loss  ", style="bold")
        if self.story.losses:
            loss.append(f"{self.story.losses[-1]:.3f}  ", style="bold cyan")
            loss.append(spark_line(self.story.losses, 56), style="cyan")
        else:
            loss.append("starting two workers", style="dim")
        parts: list[RenderableType] = [self._progress, loss]
        if self.story.steps:
            parts.append(self._ranks())
        return Panel(Group(*parts), title="phalanx demo", border_style="cyan", padding=(0, 1))

    def _ranks(self) -> Table:
        table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
        for title in ("rank", "tokens/s", "communication hidden, last 10 s", "memory"):
            table.add_column(title, justify="right")
        if time.monotonic() - self._looked > _LOOK_EVERY_S:
            self._looked, self._hidden = time.monotonic(), self._traces.hidden()
        for rank, facts in sorted(self.story.steps.items()):
            hidden = self._hidden.get(rank)
            table.add_row(
                str(rank),
                f"{facts['tokens_per_s']:,.0f}",
                "" if hidden is None else f"{hidden:.0%}",
                bytes_in_words(facts["resident"]),
            )
        return table


def show(settings: Settings, nproc: int, run_dir: str) -> int:
    """Train, show it live, report; the command's exit code."""
    directory = RunDirectory.create(run_dir, "demo")
    directory.record(title="phalanx demo", shown="phalanx demo")
    story = Story()
    terminal = console()
    module = "phalanx.cli.demo.train"
    launched = LaunchSettings(("--module", module, as_argument(settings)), nproc, tracing=True)
    with RecentTraces(directory.attempt(0)) as traces, _shown(story, terminal, traces) as hear:
        outcome = launch(launched, directory, hear)
    if outcome.failure is not None:
        show_failure(outcome.failure, directory)
        return outcome.exitcode
    if outcome.signal is not None:
        say(f"ended by {outcome.signal.name}; every worker has ended")
        return outcome.exitcode
    page = _close(story, directory, terminal)
    return 0 if page.exists() and all(end["identical"] for end in story.ends.values()) else 1


class _shown:
    """Shows a story while the body runs: live on a terminal, else a line now and then."""

    def __init__(self, story: Story, terminal: Console, traces: RecentTraces) -> None:
        self._story, self._terminal = story, terminal
        self._live = Live(Display(story, traces), console=terminal, refresh_per_second=8)
        self._last = time.monotonic()

    def __enter__(self) -> Callable[[int, str, str], None]:
        if not self._terminal.is_terminal:
            return self._hear_plainly
        self._live.start()
        return self._story.hear

    def __exit__(self, *exception: object) -> None:
        if self._terminal.is_terminal:
            self._live.stop()

    def _hear_plainly(self, rank: int, stream: str, line: str) -> None:
        self._story.hear(rank, stream, line)
        if self._story.losses and time.monotonic() - self._last > _PLAIN_EVERY_S:
            self._last = time.monotonic()
            done, total = self._story.progress
            self._terminal.print(f"step {done}/{total}  loss {self._story.losses[-1]:.3f}")


def _close(story: Story, directory: RunDirectory, terminal: Console) -> Path:
    terminal.print(Panel(Text(story.sample), title="what it writes now", border_style="green", padding=(0, 1)))
    run = load(directory.root)
    terminal.print(closing_table(story, run))
    page = report.write(run, directory.root / "report.html")
    terminal.print(f"\nThe whole run, step by step: [bold cyan]{page}[/]  (open it in a browser)")
    return page


def closing_table(story: Story, run: Run) -> Table:
    """The run in a few lines; every number is the report's own."""
    first, start = story.ends[0], story.starts[0]
    held = max(end["memory"]["state"] for end in story.ends.values())
    whole = first["memory"]["unsharded_state"]
    hidden, loss, speed = hidden_share(run), loss_progress(run), tokens_per_s(run)
    identical = all(end["identical"] for end in story.ends.values())
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(style="bold")
    chance = f"{start['parameters'] / 1e6:.2f} million parameters, {start['world']} ranks on {start['backend']}"
    table.add_row("model", chance)
    if loss is not None:
        table.add_row("loss", f"{loss.first:.3f} → {loss.last:.3f}, mean of ranks and of the last {SMOOTHED_STEPS} steps")
    table.add_row("held-out loss", f"{first['held_out'][0]:.3f} → {first['held_out'][1]:.3f}")
    if speed is not None:
        table.add_row("throughput", f"{speed:,.0f} tokens/s, all ranks, second half of the run")
    table.add_row("communication hidden", "none to hide" if hidden is None else f"{hidden:.0%}")
    table.add_row("optimizer memory", f"{bytes_in_words(held)} a rank; unsharded {bytes_in_words(whole)}")
    table.add_row("replicas identical", "[green]yes, compared bit for bit[/]" if identical else "[red]NO[/]")
    return table
