"""`phalanx runs`: which runs there are, and taking old ones away."""

from __future__ import annotations

import time

import click

from phalanx.cli.console import Amount, bytes_in_words, quantity, say, visible
from phalanx.errors import ConfigError
from phalanx.launch.elastic.history import tell
from phalanx.launch.elastic.story import What
from phalanx.launch.records.runs import RunInfo, list_runs, remove
from phalanx.launch.rundir import RunDirectory

_DAY_S = 86400.0


@click.command("runs", short_help="List the runs kept here, or remove old ones.")
@click.option("--run-dir", "parent", default="runs", metavar="DIR", help="Where runs are kept.")
@click.option("--clean", is_flag=True, help="Remove runs: all but the newest, see --keep and --older-than.")
@click.option("--keep", type=click.IntRange(0), default=None, metavar="N", help="With --clean: keep the N newest (10).")
@click.option("--older-than", type=Amount(0), metavar="DAYS", help="With --clean: remove those older than this.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def command(parent: str, clean: bool, keep: int | None, older_than: float | None, yes: bool) -> int:
    """List the runs under DIR, the newest first: when, what, how it ended, on how many workers, how large.

    \b
    phalanx runs                            the list
    phalanx runs --clean                    remove all but the 10 newest
    phalanx runs --clean --older-than 7     remove those older than a week
    """
    if not clean and (keep is not None or older_than is not None):
        raise ConfigError("--keep and --older-than say what --clean removes. Add --clean.")
    runs = list_runs(parent)
    if not clean:
        _show(runs, parent)
        return 0
    chosen = old_runs(runs, 0 if keep is None and older_than is not None else 10 if keep is None else keep, older_than)
    if not chosen:
        say(f"nothing to remove of {quantity(len(runs), 'run')} under {parent}")
        return 0
    size = sum(run.num_bytes() for run in chosen)
    names = f"{chosen[-1].path.name} to {chosen[0].path.name}"
    words = visible(f"{quantity(len(chosen), 'run')}, {bytes_in_words(size)}, {names}")
    if not yes and not click.confirm(f"remove {words}?", err=True):
        return 1
    left = [run for run in chosen if not _is_removed(run)]
    say(f"removed {words}" if not left else f"removed {quantity(len(chosen) - len(left), 'run')} of {len(chosen)}")
    return 1 if left else 0


def _is_removed(run: RunInfo) -> bool:
    """One that cannot be removed, which may be somebody else's, is said; it does not keep the others."""
    try:
        remove(run)
    except OSError as error:
        say(f"{run.path} cannot be removed: {error.strerror or error}")
        return False
    return True


def old_runs(runs: list[RunInfo], keep: int, older_than_days: float | None) -> list[RunInfo]:
    """Which of `runs`, the newest first, to remove: never one that is still going on."""
    limit = float("inf") if older_than_days is None else time.time() - older_than_days * _DAY_S
    return [run for run in runs[keep:] if not run.is_running and run.written_s < limit]


def _show(runs: list[RunInfo], parent: str) -> None:
    if not runs:
        say(f"no runs under {parent}")
        return
    # Plain columns, however narrow the terminal: names are copied from here into other commands.
    longest = max(len(str(run.path)) for run in runs)
    click.secho(f"{'run':<{longest}}  {'state':<16}  {'workers':>7}  {'took':>8}  {'size':>7}", dim=True)
    for run in runs:
        seconds = run.facts.get("seconds")
        # A folder from elsewhere may say anything, also a number of seconds that no float can hold.
        took = f"{seconds:,.0f} s" if isinstance(seconds, int | float) and abs(seconds) < 1e12 else ""
        state = click.style(f"{visible(run.state):<16}", fg=None if run.state in ("finished", "running") else "red")
        size, traced = bytes_in_words(run.num_bytes()), "  traced" if run.is_traced else ""
        workers, besides = visible(str(run.facts.get("nproc", "?"))), traced + _changes(run)
        click.echo(f"{visible(str(run.path)):<{longest}}  {state}  {workers:>7}  {took:>8}  {size:>7}{besides}")


def _changes(run: RunInfo) -> str:
    """What became of the ranks of an elastic run."""
    story = tell(RunDirectory(run.path)) if run.facts.get("elastic") else None
    if story is None:
        return ""
    lost = story.count(What.LOST) + story.count(What.FENCED)
    counts = {"lost": lost, "left": story.count(What.LEFT), "joined": story.count(What.JOINED)}
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"  elastic: {words}" if words else "  elastic"
