"""What a traced run tells of its cuts, and the picture of them in the report."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from phalanx.compile.stitch import CUTS, PIECE_BACKWARD
from phalanx.observe import report, trace
from phalanx.observe.run import load
from tests.cluster import run_ranks
from tests.compile.training import cut, train, wrap

pytestmark = pytest.mark.timeout(60)


def train_traced(rank: int, world: int, directory: str) -> str:
    torch._dynamo.reset()
    trace.start(directory, rank, world)
    try:
        wrapper = wrap("gpt")
        train(rank, wrapper, cut(wrapper))
        return wrapper.plan.hash
    finally:
        trace.stop()


@pytest.mark.thorough  # what is written of it, without a browser or a report, is in test_explain.py
def test_the_report_shows_the_cut_graph_by_the_plan_in_force(tmp_path: Path) -> None:
    plan, _ = run_ranks(2, train_traced, str(tmp_path))
    run = load(tmp_path)
    for rank in run.ranks:
        cuts = rank.facts[CUTS]
        assert cuts["plan"] == plan
        num_pieces = len(cuts["pieces"])
        spans = rank.named(PIECE_BACKWARD)
        assert len(spans) == 3 * num_pieces >= 12
        # Of each step, the last piece's backward comes first; none overlap.
        assert [span.attrs["piece"] for span in spans[:num_pieces]] == list(range(num_pieces))[::-1]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    page = report.render(run)
    assert "The compiled graph" in page
    assert page.count(", piece ") == num_pieces
    assert f"plan {plan[:12]}" in page
