"""`phalanx bench`: run a benchmark of the source tree and pass its table on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

import phalanx
from phalanx.cli.console import say
from phalanx.errors import ConfigError

NAMES = ("collectives", "ddp", "zero", "remote", "compile", "scaling")


@click.command(
    "bench",
    short_help="Measure phalanx beside torch's own.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(name: str, arguments: tuple[str, ...]) -> int:
    """Run benchmark NAME: collectives, ddp, zero, remote, compile, scaling, or all of them.

    ARGUMENTS go to the benchmark; `phalanx bench ddp --help` lists its own. Results are printed and kept in
    bench/results/ as JSON and as a plot.
    """
    root = source_tree()
    present = [one for one in NAMES if (root / "bench" / f"{one}.py").exists()]
    if name != "all" and name not in present:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(present)} and all")
    worst = 0
    for one in present if name == "all" else [name]:
        if name == "all":
            say(f"bench {one}")
        worst = max(worst, _run(root, one, arguments))
    return worst


def source_tree() -> Path:
    """Where `bench/` is. Benchmarks are part of the source, not of the installed package."""
    root = Path(phalanx.__file__).resolve().parents[1]
    if not (root / "bench" / "table.py").exists():
        raise ConfigError(
            "benchmarks are part of the source tree, which this phalanx was not installed from. "
            "Clone the repository and run `make bench` there."
        )
    return root


def _run(root: Path, name: str, arguments: tuple[str, ...]) -> int:
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environ.get("PYTHONPATH")])])
    started = subprocess.Popen([sys.executable, "-m", f"bench.{name}", *arguments], env=environ)
    try:
        return started.wait()
    except KeyboardInterrupt:
        # The terminal sent it to the benchmark as well, which ends its own workers.
        return started.wait()
