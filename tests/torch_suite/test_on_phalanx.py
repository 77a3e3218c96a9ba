"""Torch's own tests of collectives and of its own wrapper, on the backend "phalanx" where they expect gloo.

Nothing of ours but the backend: no crash, no hang, and the same results. In `make soak`: two minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster import run_ranks
from tests.cluster.pool import stop_pool
from tests.torch_suite.body import run_torch_test
from tests.torch_suite.catalogue import all_tests
from tests.torch_suite.left_out import LEFT_OUT, NOT_ON_PHALANX, RANKS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]

# These want a group of some of the ranks, and more than two ranks for it.
_SUBGROUPS = re.compile(r"_group(_(max|min|product|sum))?$|new_subgroups|hierarchical")
_FULL = re.compile(r"full_group|_process_group")


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Iterator[None]:
    # Torch's test modules change global settings of their process, which no other test should meet.
    yield
    stop_pool()


NAMES = [name for name in all_tests() if name not in LEFT_OUT and name not in NOT_ON_PHALANX]


@pytest.mark.parametrize("name", NAMES)
def test_torch(name: str) -> None:
    of_some = _SUBGROUPS.search(name) and not _FULL.search(name)
    ranks = RANKS.get(name, 4 if of_some else 2)
    skipped = run_ranks(ranks, run_torch_test, name, True, backend="phalanx", timeout_s=60)
    assert skipped == [None] * len(skipped), f"skipped itself: {skipped}. Name it in left_out.py."


def test_every_test_left_out_exists() -> None:
    assert set(NOT_ON_PHALANX) <= set(all_tests())
