"""Compiled in pieces, every model trains exactly as it does eagerly, by a plan that reducer and splitter share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import check_one_plan, cut, train_both

pytestmark = pytest.mark.timeout(60)


def train_and_report(rank: int, world: int, name: str, **kwargs: Any) -> dict[str, Any]:
    plain, compiled = train_both(rank, name, lambda wrapper: cut(wrapper, **kwargs))
    explanation = check_one_plan(compiled.wrapper)
    return {
        "equal": compiled.equals(plain),
        "num_buckets": len(compiled.wrapper.plan.buckets),
        "early": compiled.launched_early,
        "pieces": explanation.pieces,
        "uncompiled": explanation.uncompiled,
        "plan": compiled.wrapper.plan.hash,
    }


@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients_losses_and_buffers_are_bit_equal_to_eager(name: str) -> None:
    first, second = run_ranks(2, train_and_report, name)
    expected = zoo.MODELS[name]
    assert first["equal"] and second["equal"]
    assert first["plan"] == second["plan"]
    assert len(first["pieces"]) >= expected.pieces
    assert first["uncompiled"] == expected.uncompiled
    assert all(piece.compiled for piece in first["pieces"])
    if expected.pieces > 1:
        assert first["num_buckets"] > 2
        assert first["early"] >= first["num_buckets"] - 1
