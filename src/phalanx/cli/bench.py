"""`phalanx bench`: run a benchmark of the source tree and pass its table on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

import phalanx
from phalanx.cli.console import say
from phalanx.errors import ConfigError

NAMES = ("collectives", "ddp", "zero", "remote", "compile", "hosts", "scaling", "tracing", "checkpoint", "elastic", "peers")

_WITH_PEERS = ("peers", "elastic")


@click.command(
    "bench",
    short_help="Measure phalanx beside torch's own.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(name: str, arguments: tuple[str, ...]) -> int:
    """Run benchmark NAME: collectives, ddp, zero, remote, compile, hosts, scaling, tracing, checkpoint,
    elastic, peers, or all of them.

    ARGUMENTS go to the benchmark; `phalanx bench ddp --help` lists its own. Results are printed and kept in
    bench/results/DATE/ as JSON and as a plot; `all` ends with a report of what was won and what was lost. Nothing
    else should run on the machine meanwhile.
    """
    root = source_tree()
    present = [one for one in NAMES if (root / "bench" / f"{one}.py").exists()]
    if name != "all" and name not in present:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(present)} and all")
    if name != "all":
        return _run(root, name, arguments)
    return _run_all(root, present, arguments)


def _run_all(root: Path, names: list[str], arguments: tuple[str, ...]) -> int:
    failed: list[str] = []
    begun = time.monotonic()
    for one in names:
        say(f"bench {one}, {time.monotonic() - begun:.0f} s in")
        exitcode = _run(root, one, arguments)
        if exitcode in (-signal.SIGINT, 128 + signal.SIGINT):
            return exitcode
        if exitcode:
            failed.append(one)
    say(f"all benchmarks took {time.monotonic() - begun:.0f} s")
    kept = not {"--quick", "--no-save", "--help", "-h"} & set(arguments)
    exitcode = _run(root, "summary", ()) if kept and len(failed) < len(names) else 0
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else exitcode


def source_tree() -> Path:
    """Where `bench/` is. Benchmarks are part of the source, not of the installed package."""
    root = Path(phalanx.__file__).resolve().parents[2]
    if not (root / "bench" / "table.py").exists():
        raise ConfigError(
            "benchmarks are part of the source tree, which this phalanx was not installed from. "
            "Clone the repository and run `make bench` there."
        )
    return root


def _run(root: Path, name: str, arguments: tuple[str, ...]) -> int:
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root), *filter(None, [environ.get("PYTHONPATH")])])
    # Peers are installed apart, by `make bench-peers`, where they change nothing for anybody else.
    apart = root / ".venv-peers" / "bin" / "python"
    python = str(apart) if name in _WITH_PEERS and apart.exists() else sys.executable
    # -P: what lies in the working directory, which may be anybody's, is not taken for a module.
    started = subprocess.Popen([python, "-P", "-m", f"bench.{name}", *arguments], env=environ)
    try:
        return started.wait()
    except KeyboardInterrupt:
        # The terminal sent it to the benchmark as well, which ends its own workers.
        return started.wait()
