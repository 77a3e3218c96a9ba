"""Around every test: nothing may stay behind in the pytest process, and chance is fixed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.cluster.leaks import Leak, Snapshot, find_leaks, take_snapshot
from tests.cluster.pool import stop_pool

# Before anything imports torch: the machine is shared with the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For the programs that tests start: torch's store asks a name server about every peer, even on
# loopback, and a lost answer would cost 5 s (the workers of the cluster do not ask at all).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("phalanx")

_BEFORE = pytest.StashKey[Snapshot]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = take_snapshot()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    # Hooks in place of a fixture: the look must come after every fixture of the test is gone.
    yield
    allowed = {Leak(kind) for marker in item.iter_markers("allow_leaks") for kind in marker.args}
    leaks = find_leaks(item.stash[_BEFORE], allowed)
    if leaks:
        pytest.fail("the test left behind, in the pytest process:\n" + "\n".join(leaks), pytrace=False)


def pytest_sessionfinish() -> None:
    stop_pool()
