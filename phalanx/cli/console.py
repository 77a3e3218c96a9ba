"""How the command line writes: its own lines, its colours, and numbers in words."""

from __future__ import annotations

import click
from rich.console import Console

# Readable on dark and light terminals alike; red is kept for what went wrong.
_RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


def console() -> Console:
    """A rich console on standard output, at its current width and colour ability."""
    return Console(highlight=False)


def say(line: str) -> None:
    """One line of the command's own, on standard error so that the script's output stays clean."""
    click.echo(f"{click.style('phalanx', fg='cyan')}: {line}", err=True)


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
