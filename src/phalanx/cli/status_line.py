"""The last line of a terminal while `phalanx run` runs: where training is. Never in the way of what the script prints.

On a terminal the line is taken away before anything else is written and drawn again afterwards. Elsewhere (a file, a pipe, a
batch system's log) there is no such line, only a plain one every minute.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time

import click

from phalanx.cli.console import say, visible, write
from phalanx.launch.elastic.history import Watching
from phalanx.launch.records import status
from phalanx.launch.rundir import RunDirectory

_REDRAW_S = 0.5
_PLAIN_EVERY_S = 60.0
_CLEAR = "\r\x1b[2K"


class StatusLine:
    """Owns standard error's last line from `start` to `stop`; all output of the command goes through it meanwhile."""

    def __init__(self, directory: RunDirectory, world: int, wanted: bool) -> None:
        self._directory, self._world, self._wanted = directory, world, wanted
        self._watching = Watching(directory)
        self._on_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._drawn = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look at the ranks; nothing is drawn where it is not wanted."""
        if self._wanted:
            self._thread = threading.Thread(target=self._run, name="phalanx-status", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take the line away for good. Stopping twice is harmless."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._watching.close()
        with self._lock:
            self._clear()

    def echo(self, text: str, err: bool) -> None:
        """Write a line of a worker."""
        with self._lock:
            self._clear()
            failure = write(text, err, as_it_is=True)
            if failure is not None:
                why = f"{'stderr' if err else 'stdout'} cannot be written to any more ({failure.strerror or failure})"
                say(f"{why}; the run goes on, and all output is in {self._directory.root}")

    def say(self, line: str) -> None:
        """Write a line of the command's own."""
        with self._lock:
            self._clear()
            say(line)

    def _clear(self) -> None:
        if self._drawn:
            self._put(_CLEAR)
            self._drawn = False

    @staticmethod
    def _put(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.write(text)
            sys.stderr.flush()

    def _run(self) -> None:
        last_plain = time.monotonic()
        while not self._ended.wait(_REDRAW_S):
            if self._on_terminal:
                self._draw()
            elif time.monotonic() - last_plain > _PLAIN_EVERY_S:
                last_plain = time.monotonic()
                self.say(self._text())

    def _text(self) -> str:
        story = self._watching.look()
        return status.line(status.read(self._directory, story), self._world, story)

    def _draw(self) -> None:
        text = visible(self._text())
        # One column less than there are: a full last column would begin another line on some terminals.
        width = shutil.get_terminal_size().columns - 1
        shown = text if len(text) <= width else text[: max(0, width - 1)] + "…"
        with self._lock:
            if not self._ended.is_set():
                self._put(_CLEAR + click.style(shown, dim=True))
                self._drawn = True
