"""`phalanx run`: start the workers, pass on what they say, and say how it ended."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.console import colour_of_rank, colours, importing, quantity, say, visible, write
from phalanx.cli.status_line import StatusLine
from phalanx.errors import ConfigError
from phalanx.launch.elastic.history import Watching
from phalanx.launch.failure import FailureSummary, RankEnd
from phalanx.launch.hosts.secret import SECRET, read_secret
from phalanx.launch.records import status
from phalanx.launch.resources import may_have_accelerators, threads_for
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.variables import SWAP

if TYPE_CHECKING:
    from phalanx.launch.agent import LaunchSettings, Outcome
    from phalanx.launch.elastic.membership import Limits
    from phalanx.launch.logs import Sink

_MOST_AUTOMATIC_WORKERS = 8
# Options that hardly any script has: after the script's name they are most likely meant for us.
_OURS_ALONE = frozenset(("--nproc", "--nnodes", "--swap", "--elastic", "--max-restarts", "--run-dir"))


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Start a training script on all cores, GPUs or hosts.",
)
@click.option("-n", "--nproc", default="auto", metavar="N", help="Workers here; 'auto': GPUs, else cores.")
@click.option("--nnodes", default="1", metavar="N|MIN:MAX", help="Hosts; start the same command on each.")
@click.option("--endpoint", metavar="HOST:PORT", help="Where hosts meet: an address of the first, the same on each.")
@click.option("--secret-file", metavar="FILE", help=f"What only the hosts of this run know; else {SECRET}.")
@click.option("--node-rank", type=int, help="This host's number, when hosts are numbered by hand.")
@click.option("--run-id", default="phalanx", help="Tells runs that share an endpoint apart.")
@click.option("--elastic", is_flag=True, help="Go on when workers are lost, and replace them (phalanx.elastic.run).")
@click.option("--min", "fewest_workers", type=click.IntRange(1), help="With --elastic: the fewest workers to go on with.")
@click.option("--max", "most_workers", type=click.IntRange(1), help="With --elastic: the most there may ever be.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, help="Start again after a failure.")
@click.option("--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.option("--swap", is_flag=True, help="Torch's DDP, ZeRO and gloo become phalanx's in an unchanged SCRIPT.")
@click.option("--trace", "tracing", is_flag=True, help="Record spans for phalanx report.")
@click.option("--run-dir", default="runs", metavar="DIR", help="Where runs are kept.")
@click.option("--grace", type=click.IntRange(1), default=5, help="Seconds to end in before being killed.")
@click.option("-q", "--quiet", is_flag=True, help="Only rank 0's output, and failures; files hold everything.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: str,
    nnodes: str,
    endpoint: str | None,
    secret_file: str | None,
    node_rank: int | None,
    run_id: str,
    elastic: bool,
    fewest_workers: int | None,
    most_workers: int | None,
    max_restarts: int,
    module: bool,
    swap: bool,
    tracing: bool,
    run_dir: str,
    grace: int,
    quiet: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Start SCRIPT on every worker, with ARGUMENTS passed on.

    \b
    phalanx run train.py                       all GPUs, or all cores, of this machine
    phalanx run --nproc 2 --trace train.py     two workers, traced for phalanx report
    phalanx run --swap train.py                a script written for torch's own classes, as it is
    phalanx run --elastic --min 2 train.py     goes on while two workers are left, and replaces who is lost
    phalanx run --nnodes 2 --endpoint 10.0.0.1:29500 --secret-file phalanx.secret train.py     on both hosts
    """
    _check_script(script, module)
    # No torch: the workers import it, or one process does for all of them.
    from phalanx.launch.agent import LaunchSettings, launch
    from phalanx.launch.hosts.meeting import check_endpoint

    fewest, most = parse_nodes(nnodes)
    workers = parse_workers(nproc)
    settings = LaunchSettings(
        command=("--module", script, *arguments) if module else (script, *arguments),
        nproc=workers,
        min_nodes=fewest,
        max_nodes=most,
        endpoint=None if endpoint is None else check_endpoint(endpoint),
        node_rank=node_rank,
        run_id=run_id if endpoint else "",
        max_restarts=max_restarts,
        tracing=tracing,
        grace_s=grace,
        environ={SWAP: "1"} if swap else {},
        secret=read_secret(secret_file, os.environ) if most > 1 or secret_file else None,
        elastic=_limits(elastic, (workers * fewest, workers * most), fewest_workers, most_workers),
    )
    directory = RunDirectory.create(run_dir, Path(script).stem)
    threads = os.environ.get("OMP_NUM_THREADS") or threads_for(workers)
    if not quiet:
        say(f"{quantity(workers, 'worker')}, OMP_NUM_THREADS={threads} each, logs in {directory.root}")
        if misplaced := _misplaced(arguments):
            say(misplaced)
        if most == 1 and (endpoint or secret_file or node_rank is not None):
            say("--endpoint, --secret-file and --node-rank are for several hosts (--nnodes): on one they have no effect")
    world = max(workers * most, most_workers or 0)
    line = StatusLine(directory, world, wanted=not quiet)
    is_first = _Firsts(directory) if elastic else _is_first
    line.start()
    try:
        outcome = launch(settings, directory, _sink(world, is_first if quiet else None, line), line.say)
    finally:
        line.stop()
    _close(outcome, directory, settings, quiet)
    return outcome.exitcode


def _limits(elastic: bool, places: tuple[int, int], fewest: int | None, most: int | None) -> Limits | None:
    """`places` are those that the first hosts have together, and those that all hosts may ever have."""
    from phalanx.launch.elastic.membership import Limits

    if not elastic:
        if fewest is not None or most is not None:
            raise ConfigError("--min and --max say how many workers an elastic run may have. Add --elastic.")
        return None
    workers, limit = places[0], most or places[1]
    if not (fewest or 1) <= workers <= limit:
        raise ConfigError(f"{workers} workers (--nproc, --nnodes) are not between --min {fewest or 1} and --max {limit}.")
    return Limits(fewest or 1, workers, limit)


def parse_nodes(text: str) -> tuple[int, int]:
    """`"2"` or `"1:4"` as fewest and most hosts."""
    pieces = text.split(":")
    if len(pieces) > 2 or not all(piece.isdecimal() and int(piece) > 0 for piece in pieces):
        raise ConfigError(f"--nnodes should be a number of hosts or MIN:MAX, got {text!r}")
    fewest, most = int(pieces[0]), int(pieces[-1])
    if fewest > most:
        raise ConfigError(f"--nnodes {text} asks for at least {fewest} and at most {most} hosts")
    return fewest, most


def parse_workers(text: str) -> int:
    """A number, or `auto`: one a GPU where there are any, else one a core, at most 8."""
    if text == "auto":
        return _num_devices() or min(threads_for(1), _MOST_AUTOMATIC_WORKERS)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc should be a number of workers or 'auto', got {text!r}")
    return int(text)


def _num_devices() -> int:
    """How many accelerators there are to train on. Torch is asked only where it could find any: it takes seconds to ask."""
    if "torch" not in sys.modules and not may_have_accelerators():
        return 0
    with importing():
        import torch

        from phalanx.launch.worker import training_accelerator
    return torch.accelerator.device_count() if training_accelerator() else 0


def _check_script(script: str, module: bool) -> None:
    if module:
        sys.path.insert(0, os.getcwd())
        if not _may_be_module(script):
            remedy = " Leave --module out to run a file." if Path(script).is_file() else ""
            raise ConfigError(f"no module {script!r} can be imported from {os.getcwd()}.{remedy}")
        return
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"{script} is a directory. Name the script to run.")
    if not path.exists():
        remedy = "Name a module with --module." if path.suffix != ".py" else "Check the path."
        raise ConfigError(f"there is no script {script} in {os.getcwd()}. {remedy}")
    for name in ("phalanx", "torch"):
        # The script's folder comes first where Python looks for modules, for the workers before the script itself.
        hiding = path.parent / f"{name}.py"
        if path.is_file() and hiding.is_file():
            raise ConfigError(f"{hiding} hides the package {name}: `import {name}` would get it. Give it another name.")


def _may_be_module(name: str) -> bool:
    """False where there certainly is no such module. Nothing is imported to know: a package may print, fail, or be a script
    that would train here, as with `--module train.py`; what it does is for the workers to do."""
    names = name.split(".")
    try:
        spec = importlib.util.find_spec(names[0])
        for end in range(2, len(names) + 1):
            if spec is None or spec.submodule_search_locations is None:
                return False
            spec = PathFinder.find_spec(".".join(names[:end]), list(spec.submodule_search_locations))
    except KeyError:
        return True  # a folder in a folder without __init__.py is found by what was imported before
    except (ImportError, ValueError):
        return False
    return spec is not None


def _misplaced(arguments: tuple[str, ...]) -> str:
    """A word on options of ours that went to the script; empty if there are none. The script may have such a one too."""
    found = [one for one in arguments if one.partition("=")[0] in _OURS_ALONE]
    if not found:
        return ""
    return f"{found[0]} stands after the script's name and goes to the script. Options of phalanx run come before it."


def _meanwhile(end: RankEnd) -> str:
    pieces = [end.doing] if end.doing else []
    if end.message:
        first_line = end.message.strip().splitlines()[0]
        pieces.append("then failed with " + (first_line[:157] + "…" if len(first_line) > 158 else first_line))
    elif end.exitcode == 0:
        pieces.append("finished well")
    return "; ".join(pieces) or end.how


def _is_first(rank: int) -> bool:
    return rank == 0


class _Firsts:
    """Who is, or was, rank 0 of an elastic run: it is another worker when that one is lost."""

    def __init__(self, directory: RunDirectory) -> None:
        self._watching = Watching(directory)

    def __call__(self, worker: int) -> bool:
        story = self._watching.look()
        return worker in ([one.members[0] for one in story.generations] if story and story.generations else [0])


def _sink(world: int, is_shown: Callable[[int], bool] | None, line: StatusLine) -> Sink:
    width = len(str(world - 1))
    # Output that goes to a file or a pipe stays as it is; on a terminal it must not be able to do anything.
    on_terminal = {"stdout": sys.stdout.isatty(), "stderr": sys.stderr.isatty()}

    def show(rank: int, stream: str, said: str) -> None:
        if is_shown is not None and not is_shown(rank):
            return
        prefix = f"{rank:>{width}} │ " if world > 1 else ""
        if prefix and on_terminal[stream] and colours() is None:
            prefix = click.style(prefix, fg=colour_of_rank(rank), bold=stream == "stderr")
        line.echo(prefix + (visible(said) if on_terminal[stream] else said), err=stream == "stderr")

    return show


def _close(outcome: Outcome, directory: RunDirectory, settings: LaunchSettings, quiet: bool) -> None:
    if outcome.signal is not None:
        say(f"ended by {outcome.signal.name} after {outcome.seconds:.1f} s; every worker has ended")
    elif outcome.exitcode:
        if outcome.given_up:
            say(click.style("the run was given up", fg="red", bold=True) + f": {outcome.given_up}")
        if outcome.elsewhere:
            say(click.style("another host ended the run", fg="red", bold=True) + f": {outcome.elsewhere}")
        if outcome.failure is not None:
            show_failure(outcome.failure, directory)
    else:
        if not quiet:
            say(f"finished in {outcome.seconds:.1f} s")
        if settings.nproc > 1:
            ranks = status.read(directory)
            # By another store than the run's: a file of the script's own, or one that it serves itself.
            if outcome.met is False and not any(one.joined for one in ranks):
                _say_apart(settings.nproc)
            elif ranks and all(one.apart for one in ranks):
                _say_not_averaged(ranks[0].step)
    if settings.tracing and not quiet:
        say(f"see where the time went: phalanx report {directory.root}")


def _say_apart(workers: int) -> None:
    """Nobody asked for the others: what ran was not one training."""
    say(
        click.style("the workers never joined each other", fg="yellow", bold=True)
        + f": {workers} independent copies of the script ran, each on all the data. Call phalanx.init() at its start and "
        "wrap the model in phalanx.DistributedDataParallel; or run one copy with --nproc 1."
    )


def _say_not_averaged(num_steps: int) -> None:
    """They joined each other, and trained apart all the same."""
    say(
        click.style("no gradients were averaged", fg="yellow", bold=True)
        + f": each worker made {num_steps} optimizer steps by itself, on a model of its own. Wrap the model before "
        "the loop, model = phalanx.DistributedDataParallel(model), and call that, outside no_sync()."
    )


def show_failure(failure: FailureSummary, directory: RunDirectory) -> None:
    """The first failure in full, what to do, and the others in a line each."""
    first = failure.first
    say(click.style(f"rank {first.rank} failed first", fg="red", bold=True) + f" ({first.how})")
    said = first.traceback or (first.message if first.message != first.how else "")
    for line in said.rstrip().splitlines() or ["it left no message"]:
        write(f"    {visible(line)}", err=True)
    if failure.hint:
        say(click.style("what to do", bold=True) + f": {failure.hint}")
    if failure.others:
        say("meanwhile")
    for end in failure.others:
        doing = "failed in the same way" if failure.alike(end) else _meanwhile(end)
        write(f"    rank {end.rank}: {visible(doing)}", err=True)
    say(f"all output is in {directory.root}")
