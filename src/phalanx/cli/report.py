"""`phalanx report`: a run directory as one HTML page, and as files for other tools."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from phalanx.cli.console import echo_path, importing, say
from phalanx.errors import ConfigError, PhalanxError, StateError
from phalanx.launch.records.runs import newest


@click.command("report", short_help="Turn a traced run into one HTML page.")
@click.argument("run_dir", required=False)
@click.option("-o", "--output", metavar="FILE", help="The page; report.html in the run directory by default.")
@click.option("--perfetto", "perfetto_file", metavar="FILE", help="Also write a Perfetto/Chrome trace.")
@click.option("--tensorboard", "tensorboard_dir", metavar="DIR", help="Also write TensorBoard scalars.")
@click.option("--open", "opening", is_flag=True, help="Open the page in a browser.")
@click.option("--runs", "parent", default="runs", metavar="DIR", help="Where runs are kept.")
def command(
    run_dir: str | None,
    output: str | None,
    perfetto_file: str | None,
    tensorboard_dir: str | None,
    opening: bool,
    parent: str,
) -> int:
    """Turn RUN_DIR, written by phalanx run, into one HTML page that opens offline.

    Without RUN_DIR: the newest run, of the traced ones if there are any.
    """
    with importing():
        from jinja2 import UndefinedError

        from phalanx.observe import perfetto, report, tensorboard
        from phalanx.observe.run import load
    if run_dir is None:
        run_dir = str(newest(parent, traced=True).path)
        latest = str(newest(parent).path)
        if latest != run_dir:
            # Whoever asks after a failure means the run that has just failed.
            say(f"{run_dir} is the newest traced run. Of the newest of all: phalanx report {latest}")
    run = load(run_dir)
    page = Path(output) if output else Path(run_dir) / "report.html"
    try:
        report.write(run, page)
        echo_path(page)
        if perfetto_file:
            echo_path(perfetto.export(run, perfetto_file))
        if tensorboard_dir:
            tensorboard.export(run, tensorboard_dir)
            echo_path(tensorboard_dir)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or page}: {error.strerror}") from None
    except PhalanxError:
        raise  # says what is wrong by itself, as that TensorBoard is not installed
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, UndefinedError) as error:
        # Each line has the form of an event, but what it says cannot have happened. Only a run that somebody edited does.
        raise StateError(
            f"{run_dir} is malformed: its traces do not fit together ({type(error).__name__}: {error}). Trace the run again."
        ) from error
    if perfetto_file:
        say("open the trace at https://ui.perfetto.dev or chrome://tracing")
    if opening:
        webbrowser.open(page.resolve().as_uri())
    return 0
