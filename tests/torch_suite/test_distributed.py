"""Torch's own tests of DistributedDataParallel, with ours in its place, on gloo and CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import run_ranks
from tests.cluster.pool import stop_pool
from tests.torch_suite.body import run_torch_test
from tests.torch_suite.catalogue import ddp_tests
from tests.torch_suite.left_out import LEFT_OUT, RANKS

# Set to run torch's own class in this bench: a test that fails so is no evidence against ours.
_REFERENCE = os.environ.get("TORCH_SUITE_REFERENCE") == "1"


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Iterator[None]:
    # Torch's test modules change global settings of their process, which no other test should meet.
    yield
    stop_pool()


@pytest.mark.parametrize("name", [name for name in ddp_tests() if name not in LEFT_OUT])
def test_torch(name: str) -> None:
    skipped = run_ranks(RANKS.get(name, 2), run_torch_test, name, _REFERENCE, timeout_s=100)
    assert skipped == [None] * len(skipped), f"skipped itself: {skipped}. Name it in left_out.py."


def test_every_test_left_out_exists() -> None:
    assert set(LEFT_OUT) <= set(ddp_tests())
