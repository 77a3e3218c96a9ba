"""Waiting is not silent, and not chatty either."""

from __future__ import annotations

import time

import pytest

from phalanx.comm.failure.waiting import Waiting


def test_it_says_so_after_ten_seconds_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[str] = []
    waiting = Waiting(said.append)
    moments = []
    for second in range(1600):
        now = 1000.0 + second
        before = len(said)
        waiting.look(lambda: "a waits for b at c")
        if len(said) > before:
            moments.append(second)
    assert moments == [10, 60, 300, 900, 1500]
    assert said[0].startswith("waiting since ") and said[0].endswith(" (10 s): a waits for b at c")
