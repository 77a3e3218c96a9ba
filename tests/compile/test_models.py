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


# Compiling takes most of the time, and every rank does it: what two ranks add shows in a few models as well as in all.
ON_TWO = ("mlp",)
# What they add to a neighbour that is always run is little: a container, a dropout, other layers, another way to recompute.
LITTLE_ADDED = (
    *("sequential", "gpt_dropout", "gpt_checkpointed", "gpt_reentrant"),
    *("cnn", "custom", "prepared", "mutating", "broken"),
)
CASES = [
    *((name, 2 if name in ON_TWO else 1) for name in zoo.MODELS if name not in LITTLE_ADDED),
    *(pytest.param(name, 1, marks=pytest.mark.thorough) for name in LITTLE_ADDED),
    *(pytest.param(name, 2, marks=pytest.mark.thorough) for name in zoo.MODELS if name not in ON_TWO),
]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_gradients_losses_and_buffers_are_bit_equal_to_eager(name: str, world: int) -> None:
    every = run_ranks(world, train_and_report, name)
    first, expected = every[0], zoo.MODELS[name]
    assert all(one["equal"] for one in every)
    assert len({one["plan"] for one in every}) == 1
    assert len(first["pieces"]) >= expected.pieces
    assert first["uncompiled"] == expected.uncompiled
    assert all(piece.compiled for piece in first["pieces"])
    if expected.pieces > 1:
        assert first["num_buckets"] > 2
        assert first["early"] >= first["num_buckets"] - 1
