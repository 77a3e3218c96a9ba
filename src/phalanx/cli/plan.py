"""`phalanx plan`: buckets, memory and step time of a model, before it is trained."""

from __future__ import annotations

import click

from phalanx.cli.console import Amount, importing


@click.command("plan", short_help="Predict buckets, memory and step time for a model and a world size.")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("-w", "--world", "worlds", multiple=True, type=click.IntRange(1), help="Ranks; may be repeated.")
@click.option("--hosts", type=click.IntRange(1), help="Hosts; by default so many that each rank has a core.")
@click.option("--gbit", type=Amount(0.001), default=10.0, help="Network between hosts, Gbit/s.")
@click.option("--latency-us", type=Amount(0), default=30.0, help="Network latency, microseconds.")
@click.option("--optimizer", default="AdamW", help="A class of torch.optim.")
@click.option("--bucket-cap-mb", type=Amount(0), default=None, help="As DistributedDataParallel's.")
@click.option("--bucket-view", is_flag=True, help="gradient_as_bucket_view=True.")
@click.option("--backend", default=None, help="For the calibration; phalanx's choice by default.")
@click.option("--no-time", is_flag=True, help="Memory only; start no calibration.")
def command(
    target: str,
    worlds: tuple[int, ...],
    hosts: int | None,
    gbit: float,
    latency_us: float,
    optimizer: str,
    bucket_cap_mb: float | None,
    bucket_view: bool,
    backend: str | None,
    no_time: bool,
) -> int:
    """Predict what training the model of MODULE:FUNCTION (or FILE.py:FUNCTION) takes.

    The function returns a model; to predict time as well, a model and a function of it that computes a loss.
    """
    with importing():
        from phalanx.cli.prediction import Wanted, show
    wanted = Wanted(worlds or (2, 8, 64, 1024), hosts, gbit, latency_us, optimizer, bucket_cap_mb, bucket_view, backend)
    return show(target, wanted, with_time=not no_time)
