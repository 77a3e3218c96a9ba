"""What workers write, between their pipes and who looks: whatever they write, and whoever else holds the pipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.logs import Follower, Keeper

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
