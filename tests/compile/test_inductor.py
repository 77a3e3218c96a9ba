"""The default compiler of pieces: generated code, so equal to eager up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.compile import phalanx_backend
from tests.cluster import run_ranks
from tests.compile.training import check_one_plan, train_both

pytestmark = pytest.mark.timeout(100)

# A linear model and one whose activations have strides that inductor would like to change.
NAMES = ("mlp", "cnn")


def train_with_inductor(rank: int, world: int) -> dict[str, Any]:
    import torch._inductor.config as inductor

    found = {}
    # In this process: compiler processes would stay behind.
    with inductor.patch(compile_threads=1):
        for name in NAMES:
            plain, compiled = train_both(rank, name, lambda wrapper: torch.compile(wrapper, backend=phalanx_backend))
            explanation = check_one_plan(compiled.wrapper)
            early = compiled.launched_early - (len(compiled.wrapper.plan.buckets) - 1)
            # Sums are taken in another order: a few units in the last place of values around one.
            close = compiled.is_close_to(plain, rtol=1e-4, atol=1e-5)
            found[name] = (close, early, [piece.error for piece in explanation.pieces])
    return found


def test_pieces_compiled_by_inductor_train_as_eager_does() -> None:
    for found in run_ranks(2, train_with_inductor, timeout_s=90):
        for name, (close, early, errors) in found.items():
            assert close, name
            assert early >= 0 and len(errors) >= 3 and set(errors) == {""}, name
