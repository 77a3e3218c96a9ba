"""Every rank is told what differs and where, before a step is applied; on every backend, in bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks
from tests.mismatch import around, harmless, later, order, rows
from tests.mismatch.rows import Odd

SOON_S = 20  # an agreement to which nobody comes is found out after seconds
BACKENDS = ("gloo", "phalanx")
ROWS = {**rows.ROWS, **around.ROWS, **later.ROWS, **order.ROWS}
APPLIED = around.APPLIED
# On gloo some collective stays under way, and gloo's threads with it.
LEAKS = {"not clipped", "a hook later", *around.PASSED_BY, *later.PASSED_BY, *order.PASSED_BY}
CASES = [
    (name, backend)
    for name in ROWS
    for backend in BACKENDS
    if backend == "gloo" or not name.startswith(around.BY_STORE)
]


def tried(rank: int, world: int, name: str, folder: Path) -> tuple[str, str, bool, float]:
    """What one rank gets out of a row: the kind of error, its words, whether nothing was applied, and how long it took."""
    row, _ = ROWS[name]
    odd, started = Odd(rank, world, folder), time.monotonic()
    try:
        row(odd)
    except (MismatchError, PeerFailure) as error:
        return type(error).__name__, str(error), odd.unchanged, time.monotonic() - started
    return "nothing", "", odd.unchanged, time.monotonic() - started


@pytest.mark.covering(1)  # every row on one backend at least, by turns
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_setting_that_differs_is_an_error_on_every_rank(name: str, backend: str, tmp_path: Path) -> None:
    words = ROWS[name][1]
    leaks = ["native_threads"] if backend == "gloo" and name in LEAKS else []
    said = run_ranks(3, tried, name, tmp_path / "saves", backend=backend, allow_leaks=leaks)
    for rank, (kind, text, unchanged, seconds) in enumerate(said):
        assert kind in ("MismatchError", "PeerFailure"), f"rank {rank} noticed nothing"
        assert words in text, text
        assert f"rank {rank}" in text and "rank 1" in text, text
        assert unchanged or name in APPLIED, f"rank {rank} has applied a step: {text}"
        assert seconds < SOON_S, text


# Three ranks that compile take as long as all others together.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == "compiled" else name for name in harmless.ROWS]
)
def test_what_may_differ_leaves_all_ranks_with_the_same_bits(name: str, tmp_path: Path) -> None:
    first, *others = run_ranks(3, harmless.tried, name, tmp_path / "saves", backend="phalanx")
    for other in others:
        assert all(map(torch.equal, first, other))
