"""The `phalanx` command. Finds the subcommand, and turns what a user got wrong into one line and exit code 2.

Subcommands are imported when they are used, and import torch only when they run, so that help, completion and a typing
mistake answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

import phalanx
from phalanx.cli.console import colours, keep_streams_open, take_every_character, visible, write
from phalanx.errors import PhalanxError

_COMMANDS = {
    "run": "Start a training script on all cores, GPUs or hosts.",
    "demo": "Train a small GPT on this machine and show what happens.",
    "doctor": "Check this machine, with a remedy for everything that is wrong.",
    "top": "Watch a run: ranks, step, rate, who waits for whom.",
    "report": "Turn a traced run into one HTML page.",
    "runs": "List the runs kept here, or remove old ones.",
    "scale": "Let an elastic run go on with more or fewer workers.",
    "plan": "Predict buckets, memory and step time for a model and a world size.",
    "checkpoints": "List, verify, compare, delete and convert checkpoints.",
    "bench": "Measure phalanx beside torch's own.",
}

# What is typed comes back in messages, however long it was.
_LONGEST = 600


class LazyGroup(click.Group):
    """A group whose commands live in modules of the same name, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = "phalanx.cli.demo.command" if name == "demo" else f"phalanx.cli.{name}"
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(phalanx.__version__, prog_name="phalanx")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Data-parallel training for PyTorch: run it, watch it, see where the time went."""
    ctx.color = colours()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the `phalanx` command. Never returns."""
    keep_streams_open()
    take_every_character()
    try:
        # `phalanx_command` lets an interrupt end the process until here; while torch is imported `importing` does.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(cli.main(args=arguments, prog_name="phalanx", standalone_mode=False) or 0)
    except click.UsageError as error:
        _fail(_one_line(error), error.ctx)
    except click.ClickException as error:
        _fail(error.format_message())
    except PhalanxError as error:
        _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", exitcode=130)
    except BrokenPipeError:
        # Whoever read our output has gone; silence the interpreter's own complaint at exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # A name too long, a full disk, a folder that may not be read: the system says what, and it is the user's to mend.
        named = f" {error.filename}" if error.filename else ""
        _fail(f"the system refused{named}: {error.strerror or error}")


def _fail(message: str, ctx: click.Context | None = None, exitcode: int = 2) -> None:
    command = ctx.command_path if ctx is not None else "phalanx"
    line = " ".join(message.split())
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    if ctx is not None and "--help" not in line:
        line += f" (see {command} --help)"
    write(f"{click.style('error', fg='red', bold=True)}: {visible(line)}", err=True)
    sys.exit(exitcode)


def _one_line(error: click.UsageError) -> str:
    message = error.format_message()
    wrong: Any = getattr(error, "option_name", None)
    if isinstance(error, click.NoSuchOption):
        close = difflib.get_close_matches(str(wrong), error.possibilities or [], n=1)
        return f"no such option {wrong}" + (f", did you mean {close[0]}?" if close else "")
    if message.startswith("No such command"):
        name = message.split("'")[1] if "'" in message else ""
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_COMMANDS)}"
        return f"no such command {name!r}, {hint}"
    return message[0].lower() + message[1:].rstrip(".") if message else "wrong usage"


if __name__ == "__main__":
    main()
