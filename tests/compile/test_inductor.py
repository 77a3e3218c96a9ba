"""The default compiler of pieces: generated code, so equal to eager up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.compile import phalanx_backend
from tests.cluster import run_ranks
from tests.compile.training import check_one_plan, train_both

pytestmark = pytest.mark.timeout(100)


def train_with_inductor(rank: int, world: int, name: str) -> tuple[bool, int, list[Any]]:
    import torch._inductor.config as inductor

    # In this process: compiler processes would stay behind.
    with inductor.patch(compile_threads=1):
        plain, compiled = train_both(rank, name, lambda wrapper: torch.compile(wrapper, backend=phalanx_backend))
    explanation = check_one_plan(compiled.wrapper)
    early = compiled.launched_early - (len(compiled.wrapper.plan.buckets) - 1)
    # Sums are taken in another order: a few units in the last place of values around one.
    close = compiled.is_close_to(plain, rtol=1e-4, atol=1e-5)
    return close, early, [piece.error for piece in explanation.pieces]


# Every rank has the C++ compiler run a dozen times. The second's activations have strides that inductor likes to change.
@pytest.mark.parametrize(
    ("name", "world"), [("mlp", 1), *(pytest.param(name, 2, marks=pytest.mark.thorough) for name in ("mlp", "cnn"))]
)
def test_pieces_compiled_by_inductor_train_as_eager_does(name: str, world: int) -> None:
    for close, early, errors in run_ranks(world, train_with_inductor, name, timeout_s=90):
        assert close
        assert early >= 0 and len(errors) >= 3 and set(errors) == {""}
