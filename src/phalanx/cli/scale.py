"""`phalanx scale`: more or fewer workers for an elastic run."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.console import quantity, say
from phalanx.errors import ConfigError, StateError
from phalanx.launch.elastic.supervisor import SCALE_FILE
from phalanx.launch.records.runs import RunInfo
from phalanx.launch.rundir import RunDirectory, replace_private


@click.command("scale", short_help="Let an elastic run go on with more or fewer workers.")
@click.argument("run", type=click.Path(file_okay=False))
@click.argument("workers", type=click.IntRange(1))
def command(run: str, workers: int) -> int:
    """Ask the run in folder RUN to go on with WORKERS workers after the step under way.

    It stays within the run's own --min and --max. Workers that are to leave end well; new ones join when they are ready.
    """
    directory = RunDirectory(run)
    facts = directory.facts()
    if not facts:
        raise ConfigError(f"there is no run in {run}. Give the folder that phalanx run has named; phalanx runs lists them.")
    # Asked of the launcher, where it is on this host: one that was killed has not written down that the run is over.
    info = RunInfo(directory.root, facts, 0.0)
    if not info.is_running:
        raise ConfigError(f"the run in {run} has ended ({info.state}).")
    if not facts.get("elastic"):
        raise ConfigError(f"the run in {run} is not elastic: start it with phalanx run --elastic.")
    fewest, most = _limits(facts["elastic"], directory.root)
    if not fewest <= workers <= most:
        raise ConfigError(f"the run in {run} may have {fewest} to {most} workers, asked for {workers}.")
    # Whole or not at all: the launcher may look in between.
    replace_private(directory.root / SCALE_FILE, str(workers))
    say(f"asked for {quantity(workers, 'worker')}")
    return 0


def _limits(recorded: object, root: Path) -> tuple[int, int]:
    """The fewest and the most workers, as the run's record says."""
    match recorded:
        case [int(fewest), int(most)]:
            return fewest, most
    raise StateError(f"{root} is malformed: its record says elastic {recorded!r:.60}, expected two numbers of workers.")
