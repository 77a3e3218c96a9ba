"""What workers write, between their pipes and who looks: whatever they write, and whoever else holds the pipe."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.logs import _PIECE_BYTES, Follower, Keeper

pytestmark = pytest.mark.timeout(60)


class Logs:
    """A keeper and a follower, with the lines that arrived."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self.path = folder / "stdout.log"
        self.follower = Follower(lambda rank, stream, line: self.lines.append(line))
        self.keeper = Keeper(self.follower, lambda notice: None)
        self.writer = self.keeper.keep(0, "stdout", self.path)

    def close(self) -> None:
        self.keeper.close()
        self.follower.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_a_worker_left_behind_and_that_never_stops_writing_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, moved = Keeper._put, []

    def put_while_more_comes(keeper: Keeper, kept: Any, data: bytes) -> None:
        put(keeper, kept, data)
        moved.append(data)
        assert len(moved) < 100, "the pipe is never empty, and the keeper waits until it is"
        os.write(logs.writer, b"more\n")

    monkeypatch.setattr(Keeper, "_put", put_while_more_comes)
    monkeypatch.setattr(Keeper, "_run", lambda keeper: None)  # so that it is all there at the end
    logs = Logs(tmp_path)
    os.write(logs.writer, b"first\n")
    logs.close()
    assert logs.lines == ["first"]


def test_a_bar_that_is_drawn_again_and_again_is_kept_in_its_last_state_alone(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    try:
        for percent in range(100):
            os.write(logs.writer, b"\r" + b"#" * 9_000 + b"%d" % percent)
        (followed,) = logs.follower._files
        wait_until(lambda: followed.rest.endswith(b"99"))
        assert len(followed.rest) == 9_002
        os.write(logs.writer, b"\r\nnext\r\n\r")
    finally:
        logs.close()
    assert logs.lines == ["#" * 9_000 + "99", "next", ""]


@pytest.mark.parametrize("length", [_PIECE_BYTES - 1, _PIECE_BYTES, _PIECE_BYTES + 1, 3 * _PIECE_BYTES])
def test_lines_arrive_whole_however_long_they_are(length: int, tmp_path: Path) -> None:
    lines = [b"a" * length, b"", b"b\xff", b"c" * length, b"no end"]
    logs = Logs(tmp_path)
    try:
        for line in lines:
            rest = line + b"\n" * (line != b"no end")
            while rest:
                rest = rest[os.write(logs.writer, rest) :]
    finally:
        logs.close()
    assert logs.lines == [line.decode(errors="replace") for line in lines]


def test_a_follower_that_is_far_behind_reads_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes((b"x" * 9_999 + b"\n") * 6_400)
    lengths = []
    follower = Follower(lambda rank, stream, line: lengths.append(len(line)))
    tracemalloc.start()
    try:
        follower.follow(0, "stdout", path)
        follower.close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lengths == [9_999] * 6_400
    assert peak < 8 * _PIECE_BYTES
