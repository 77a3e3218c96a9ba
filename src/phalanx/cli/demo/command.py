"""`phalanx demo`, as far as its help needs it."""

from __future__ import annotations

import click

from phalanx.cli.console import Amount, importing
from phalanx.cli.demo.settings import Settings


@click.command("demo", short_help="Train a small GPT on this machine and show what happens.")
@click.option("-n", "--nproc", type=click.IntRange(1), default=2, help="Workers.")
@click.option("--steps", type=click.IntRange(1), default=Settings.num_steps, help="At most this many.")
@click.option("--seconds", type=Amount(1), default=Settings.seconds, help="About this long at most.")
@click.option("--sample", type=click.IntRange(1), default=Settings.sample_length, help="Characters to write.")
@click.option("--run-dir", default="runs", metavar="DIR", help="Where the run is kept.")
def command(nproc: int, steps: int, seconds: float, sample: int, run_dir: str) -> int:
    """Train a small character GPT on the documentation that Python ships, and report on it."""
    with importing():
        from phalanx.cli.demo.show import show
    return show(Settings(num_steps=steps, seconds=seconds, sample_length=sample), nproc, run_dir)
