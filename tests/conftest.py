"""Around every test: nothing may stay behind in the pytest process, and chance is fixed.

On several workers (`pytest -n 4`) each is a pytest process with a pool of ranks and an identity of its own:
it looks for what its own processes left, and `tests/schedule.py` decides what it runs.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests import breadth, schedule
from tests.cluster.asides import keep_no_stacks_of_seeds
from tests.cluster.command import stop_starter, use_for_launches
from tests.cluster.leaks import RUN_VARIABLE, Leak, Watch
from tests.cluster.pool import stop_pool
from tests.cluster.process import SEARCH_PATH

# Until all is collected: test modules import hundreds of thousands of objects that stay, and looking through
# them for garbage again and again takes a quarter of that time.
gc.disable()
# Before anything imports torch: the machine is shared with the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For the programs that tests start: torch's store asks a name server about every peer, even on
# loopback, and a lost answer would cost 5 s (the workers of the cluster do not ask at all).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Inherited by all that the tests start, whoever their parent is in the end. Set here whatever it was: a
# worker is started by another pytest process, and so is the pytest that a test runs.
os.environ[RUN_VARIABLE] = str(os.getpid())
# Whatever they start imports this tree, and can be forked from a process that has (`tests.cluster.command`).
os.environ["PYTHONPATH"] = SEARCH_PATH

# Torch sets it when dynamo is first imported, which may be between two tests: programs that are started after that would not
# fit the warm process that was loaded before.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")

hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("phalanx")

_watch = Watch()


def pytest_configure(config: pytest.Config) -> None:
    if schedule.is_worker(config):
        schedule.end_with_controller()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.make_scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    schedule.instruct(node)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    breadth.mark_thorough(items)
    if schedule.is_worker(config):
        schedule.sort(items)
        schedule.extend_time_limits(items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    keep_no_stacks_of_seeds()
    gc.enable()
    gc.collect()
    # The look for leaks collects garbage too, several times if need be.
    gc.freeze()
    if schedule.is_worker(session.config):
        schedule.leave_quiet_names(session.config, session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    use_for_launches()
    _watch.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    # Hooks in place of a fixture: the look must come after every fixture of the test is gone.
    yield
    allowed = {Leak(kind) for marker in item.iter_markers("allow_leaks") for kind in marker.args}
    leaks = _watch.leaks(allowed)
    if leaks:
        pytest.fail("the test left behind, in the pytest process:\n" + "\n".join(leaks), pytrace=False)


def pytest_sessionfinish() -> None:
    stop_pool()
    stop_starter()
