"""Every rank is told what differs and where, before a step is applied; on every backend, in bounded time."""

from __future__ import annotations

import time

import pytest

from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks
from tests.mismatch.rows import AFTER_BACKWARD, ROWS, Odd

SOON_S = 20  # an agreement to which nobody comes is found out after seconds


def tried(rank: int, world: int, name: str) -> tuple[str, str, bool, float]:
    """What one rank gets out of a row: the kind of error, its words, whether nothing was applied, and how long it took."""
    row, _ = ROWS[name]
    odd, started = Odd(rank), time.monotonic()
    try:
        row(odd)
    except (MismatchError, PeerFailure) as error:
        return type(error).__name__, str(error), odd.unchanged, time.monotonic() - started
    return "nothing", "", odd.unchanged, time.monotonic() - started


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("name", ROWS)
def test_a_setting_that_differs_is_an_error_on_every_rank(name: str, backend: str) -> None:
    words = ROWS[name][1]
    # A gloo collective that nobody comes to stays under way until its time limit, and its threads with it.
    leaks = ["native_threads"] if backend == "gloo" and name in {*AFTER_BACKWARD, "a hook later"} else []
    for rank, (kind, text, unchanged, seconds) in enumerate(run_ranks(3, tried, name, backend=backend, allow_leaks=leaks)):
        assert kind in ("MismatchError", "PeerFailure"), f"rank {rank} noticed nothing"
        assert words in text, text
        assert f"rank {rank}" in text and "rank 1" in text, text
        assert unchanged or name in AFTER_BACKWARD, f"rank {rank} has applied a step: {text}"
        assert seconds < SOON_S, text
