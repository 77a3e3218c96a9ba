"""What ranks print reaches a terminal as text: nothing in it is obeyed but colours."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli.console import visible
from tests.cluster.command import Command, run_command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain ünï ✓\ttab", "plain ünï ✓\ttab"),
        ("\x1b[2J\x1b[Hcleared", "^[[2J^[[Hcleared"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("\x1b]52;c;Y3VybA==\x07", "^[]52;c;Y3VybA==^G"),
        ("\x9b2J", "\\x9b2J"),
        ("\x1bP+q\x1b\\", "^[P+q^[\\"),
        ("a\x00b\x7f\x08", "a^@b^?^H"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;2;1;2;3mred \x1b[6n", "\x1b[38;2;1;2;3mred ^[[6n\x1b[0m"),
        ("two\nlines\r", "two^Jlines^M"),
    ],
)
def test_control_characters_are_shown(line: str, shown: str) -> None:
    assert visible(line) == shown


NASTY = r"""
import sys
print("out \x1b]0;taken\x07 \x1b[31mred\x1b[0m", flush=True)
print("bar 1\rbar 2", flush=True)
raise ValueError("\x1b[2Jmessage \x1b]52;c;Y3VybA==\x07")
"""


def on_a_terminal(command: list[str], folder: Path) -> bytes:
    leader, follower = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = Command(command, stdout=follower, stderr=follower, stdin=follower, cwd=folder, env=environ)
    os.close(follower)
    received, deadline = b"", time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    piece = os.read(leader, 65536)
                except OSError:  # the other end is closed
                    break
                if not piece:
                    break
                received += piece
    finally:
        process.kill() if process.poll() is None else None
        process.wait()
        os.close(leader)
    return received


def test_output_and_messages_of_a_real_run_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NASTY)
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "-n", "2", "train.py"]
    received = on_a_terminal(command, tmp_path)
    for sequence in (b"\x1b]", b"\x1b[2J", b"\x07"):
        assert sequence not in received, received
    assert b"out ^[]0;taken^G \x1b[31mred\x1b[0m" in received, "shown, and colours pass"
    assert b"^[[2Jmessage ^[]52;c;Y3VybA==^G" in received and b"bar 2" in received


def test_a_name_in_an_error_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    received = on_a_terminal([sys.executable, "-m", "phalanx.cli.main", "run", "no\x1b[2J\x1b]0;x\x07.py"], tmp_path)
    assert b"\x1b]0" not in received and b"\x1b[2J" not in received and b"error" in received


def test_output_that_is_not_for_a_terminal_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('print("a\\x01b \\x1b[31mred\\x1b[0m \\x1b[2J", flush=True)')
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "-n", "1", "train.py"]
    done = run_command(command, capture_output=True, cwd=tmp_path, env=environ, timeout=90)
    assert done.stdout == b"a\x01b \x1b[31mred\x1b[0m \x1b[2J\n", done
    assert b"\x1b" not in done.stderr, "what we say ourselves has no colours there"
