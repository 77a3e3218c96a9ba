"""`phalanx checkpoints`: what is in a folder of checkpoints, whether it is whole, and what to do with it."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from phalanx.checkpoint.storage import library
from phalanx.checkpoint.storage.disk import disk_of
from phalanx.checkpoint.storage.library import Entry, Keep
from phalanx.cli.console import Amount, bytes_in_words, console, importing, quantity, say, visible
from phalanx.errors import ConfigError, PhalanxError, StateError

_HOURS = Amount(min=0)
_STEP = click.option("--step", type=int, help="The step; the newest by default.")


@click.group("checkpoints", short_help="List, verify, compare, delete, convert checkpoints.", invoke_without_command=True)
@click.argument("folder")
@click.pass_context
def command(ctx: click.Context, folder: str) -> int | None:
    """Look after the checkpoints in FOLDER, a directory or an address for fsspec. Without a command, list them."""
    disk = disk_of(folder)
    # As it is written in the names of files below it; the root of everything stays itself.
    place = folder.rstrip("/") or ("/" if folder else ".")
    ctx.obj = (disk, place)
    if ctx.invoked_subcommand is None:
        return _show(library.entries(disk, place), folder)
    return None


def _show(found: list[Entry], folder: str) -> int:
    if not found:
        say(f"no checkpoints in {folder}")
        return 1
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for title in ("step", "saved", "ranks", "size", "metrics", ""):
        table.add_column(title, justify="right" if title in ("step", "ranks", "size") else "left", overflow="fold")
    # Metrics may be folded; the folder's name is copied from here into other commands.
    table.columns[1].no_wrap = table.columns[3].no_wrap = table.columns[5].no_wrap = True
    for entry in found:
        about = entry.about
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(about["time"])) if "time" in about else ""
        if entry.commit is None:
            when = "damaged" if entry.fault else "not committed"
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in about.get("metrics", {}).items())
        size = bytes_in_words(about["total_bytes"]) if "total_bytes" in about else ""
        ranks = "" if entry.commit is None else str(entry.commit.world)
        # As text, not as markup: a metric may be named anything.
        table.add_row(str(entry.step), when, ranks, size, Text(visible(metrics)), visible(str(entry.name)))
    console().print(table)
    return 0


def _chosen(ctx: click.Context, step: int | None) -> tuple[Any, Entry]:
    disk, folder = ctx.obj
    found = [entry for entry in library.entries(disk, folder) if step is None or entry.step == step]
    committed = [entry for entry in found if entry.commit is not None or entry.fault]
    if not committed:
        raise ConfigError(f"{folder} has no checkpoint" + ("" if step is None else f" of step {step}"))
    return disk, committed[-1]


@command.command()
@click.option("--step", type=int, help="Only this step.")
@click.pass_context
def verify(ctx: click.Context, step: int | None) -> int:
    """Read every byte and compare it with its hash. Exit code 1 if anything is wrong."""
    disk, folder = ctx.obj
    found = [e for e in library.entries(disk, folder) if (e.commit or e.fault) and (step is None or e.step == step)]
    if not found:
        raise ConfigError(f"{folder} has no checkpoint" + ("" if step is None else f" of step {step}"))
    wrong = 0
    for entry in found:
        problems = list(library.problems(disk, entry))
        wrong += bool(problems)
        click.echo(f"step {entry.step}: {'whole' if not problems else quantity(len(problems), 'problem')}  {entry.name}")
        for problem in problems:
            click.echo(f"  {visible(str(problem))}")
    if wrong:
        good = library.newest_good(disk, found)
        say("no checkpoint is whole" if good is None else f"the newest good checkpoint is that of step {good.step}")
    return 1 if wrong else 0


@command.command(short_help="What differs between two steps.")
@click.argument("first", type=int)
@click.argument("second", type=int)
@click.pass_context
def compare(ctx: click.Context, first: int, second: int) -> int:
    """What differs between the checkpoints of steps FIRST and SECOND. Exit code 1 if anything does."""
    disk, one = _chosen(ctx, first)
    _, other = _chosen(ctx, second)
    lines = list(library.differences(disk, one, other))
    for line in lines:
        click.echo(visible(line))
    say(f"{quantity(len(lines), 'difference')} between step {first} and step {second}")
    return 1 if lines else 0


@command.command(short_help="Delete what no option keeps, and stopped saves.")
@click.option("--keep-last", type=click.IntRange(min=1), default=1, show_default=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Those of every K-th step stay.")
@click.option("--best", metavar="METRIC", help="The best by this metric stays: the lowest, or with -METRIC the highest.")
@click.option("--num-best", type=click.IntRange(min=1), default=1, show_default=True, help="How many best ones.")
@click.option("--abandoned-after", type=_HOURS, default=24.0, show_default=True, help="Hours until a stopped save goes.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.pass_context
def delete(ctx: click.Context, /, dry_run: bool, abandoned_after: float, **policy: Any) -> int:
    """Delete all checkpoints that no option keeps, and what stopped saves left."""
    disk, folder = ctx.obj
    keep = Keep(policy["keep_last"], policy["keep_every"], policy["best"], policy["num_best"], 3600.0 * abandoned_after)
    committed = [entry for entry in library.entries(disk, folder) if entry.commit is not None]
    # Others are deleted because the newest is there: so it has to be.
    for problem in library.problems(disk, committed[-1]) if committed else ():
        raise ConfigError(f"the newest checkpoint is not whole, so nothing was deleted: {problem}")
    for entry in library.prune(disk, folder, keep, dry_run):
        click.echo(f"{'would delete' if dry_run else 'deleted'} {entry.name}")
    return 0


@command.command(short_help="Write one as dcp, torch.save or safetensors.")
@click.argument("form", type=click.Choice(["dcp", "torch", "safetensors"]))
@click.argument("target")
@_STEP
@click.pass_context
def export(ctx: click.Context, form: str, target: str, step: int | None) -> int:
    """Write a checkpoint to TARGET as dcp (torch.distributed.checkpoint), torch (torch.save) or safetensors (model only)."""
    disk, entry = _chosen(ctx, step)
    for problem in library.problems(disk, entry):
        raise ConfigError(f"it is not whole, and is not exported: {problem}")
    with importing():
        from phalanx.checkpoint import convert
        from phalanx.checkpoint.safetensors import to_safetensors
        from phalanx.checkpoint.source import CheckpointSource
    source = CheckpointSource(disk, entry)
    try:
        {"dcp": convert.to_dcp, "torch": convert.to_torch, "safetensors": to_safetensors}[form](source, target)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, PhalanxError):
            raise
        # Whole by its hashes, which anybody can make: its texts say what no save has written.
        raise StateError(f"{entry.path} is malformed: {type(error).__name__}: {error}") from error
    say(f"step {entry.step} is in {target}")
    return 0


@command.command("import", short_help="Make one of dcp, torch.save or safetensors.")
@click.argument("form", type=click.Choice(["dcp", "torch", "safetensors"]))
@click.argument("origin")
@click.option("--step", type=click.IntRange(min=0), help="The step it is of; by default what ORIGIN says, or 0.")
@click.pass_context
def import_(ctx: click.Context, form: str, origin: str, step: int | None) -> int:
    """Make a checkpoint of ORIGIN: a folder of dcp, a file of torch.save or of safetensors (model only).

    Reading dcp unpickles: only what you trust.
    """
    with importing():
        from phalanx.checkpoint import convert
        from phalanx.checkpoint.safetensors import read_safetensors
        from phalanx.checkpoint.source import read_torch_file
    source = {"dcp": convert.read_dcp, "torch": read_torch_file, "safetensors": read_safetensors}[form](origin)
    disk, folder = ctx.obj
    name = convert.write_source(source, disk, folder, step)
    say(f"{origin} is {name}")
    return 0
