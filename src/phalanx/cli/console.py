"""How the command line writes: its own lines, its colours, and numbers in words."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

# Readable on dark and light terminals alike; red is kept for what went wrong.
_RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


class Amount(click.FloatRange):
    """A number that is at least `min`, and that is one: no bound keeps `nan` out, which compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


def console() -> Console:
    """A rich console on standard output, at its current width and colour ability."""
    from rich.console import Console

    return Console(highlight=False)


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of torch, which take seconds: an interrupt ends the command without printing where they were."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say(line: str) -> None:
    """One line of the command's own, on standard error so that the script's output stays clean."""
    write(f"{click.style('phalanx', fg='cyan')}: {visible(line)}", err=True)


def write(text: str, err: bool, as_it_is: bool = False) -> OSError | None:
    """Write a line, and return what went wrong: after that nothing is written there any more.

    For what must go on whether anybody looks or not: a pipe that nobody reads, a full disk, a terminal that is gone. Colours
    are left out where there is no terminal or none are wanted, unless `as_it_is`.
    """
    try:
        click.echo(text, err=err, color=True if as_it_is else colours())
    except OSError as error:
        _silence(2 if err else 1)
        return error
    return None


def colours() -> bool | None:
    """Whether to show any, as click takes it: None asks the stream whether it is a terminal (https://no-color.org)."""
    return False if os.environ.get("NO_COLOR") else None


def _silence(descriptor: int) -> None:
    # What is left in the stream's buffer goes there too, so that the interpreter does not complain at its end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def keep_streams_open() -> None:
    """Where the command was started without standard streams (`>&-`, some daemons): have them lead nowhere.

    Otherwise the next file that is opened would get the number of standard output, and what is printed would go there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False))


def take_every_character() -> None:
    """What a terminal or a locale has no character for (our own `│`, where it is Latin-1) is shown as its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


# Colours and weights. The other sequences move the cursor, retitle the window, write to the clipboard or make the
# terminal type an answer: whoever can print a line must not be able to do that to who reads it.
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
# C0 without tab, DEL, C1, the marks that turn the direction of text around, and what is no text: bytes of a file's name that
# Python could not decode, which a terminal might obey and a stream may refuse.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(line: str) -> str:
    """One line with its control characters shown, not obeyed: `visible("a\\x1b[2Jb") == "a^[[2Jb"`.

    Tabs and colours pass, and a line that changes the colour gives it back at its end.
    """
    pieces, colours = _COLOUR.split(line), _COLOUR.findall(line)
    shown = [_CONTROL.sub(_caret, piece) for piece in pieces]
    mixed = "".join(piece + colour for piece, colour in zip(shown, [*colours, ""], strict=True))
    return mixed + "\x1b[0m" if colours and colours[-1] not in ("\x1b[0m", "\x1b[m") else mixed


def _caret(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20 or code == 0x7F:
        return "^" + chr(code ^ 0x40)
    byte = code - 0xDC00 if 0xDC80 <= code < 0xDD00 else code  # as `os.fsdecode` hides bytes
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{code:04x}"


def echo_path(path: str | os.PathLike[str]) -> None:
    """A file's name alone on standard output: as it is for a program, as text for a terminal."""
    click.echo(visible(os.fspath(path)) if sys.stdout.isatty() else os.fsencode(path))


def colour_of_rank(rank: int) -> str:
    """The same colour for a rank everywhere."""
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def quantity(number: int, noun: str) -> str:
    """`quantity(1, "worker") == "1 worker"`, `quantity(2, "worker") == "2 workers"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bytes_in_words(count: float) -> str:
    """`bytes_in_words(3_200_000) == "3.2 MB"`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
