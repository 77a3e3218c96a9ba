"""`phalanx scale`: more or fewer workers for an elastic run."""

from __future__ import annotations

import os

import click

from phalanx.cli.console import quantity, say
from phalanx.errors import ConfigError
from phalanx.launch.elastic.supervisor import SCALE_FILE
from phalanx.launch.rundir import RunDirectory


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
    if facts.get("state") != "running" or not facts.get("elastic"):
        what = "is not elastic: start it with phalanx run --elastic" if facts.get("state") == "running" else "has ended"
        raise ConfigError(f"the run in {run} {what}.")
    fewest, most = facts["elastic"]
    if not fewest <= workers <= most:
        raise ConfigError(f"the run in {run} may have {fewest} to {most} workers, asked for {workers}.")
    # Whole or not at all: the launcher may look in between.
    draft = directory.root / f".{SCALE_FILE}.{os.getpid()}"
    draft.write_text(str(workers))
    draft.chmod(0o600)
    draft.replace(directory.root / SCALE_FILE)
    say(f"asked for {quantity(workers, 'worker')}")
    return 0
