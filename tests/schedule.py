"""Which worker runs which tests when the suite runs on several (`pytest -n 4`, which needs pytest-xdist).

Owns the order and nothing else: a test does not see where it runs.

- A file stays on one worker: its module fixtures are made once, and its calls find the pool of ranks warm. So does the
  folder of what compiles: the first compilation of a process takes as long as three others.
- The heaviest files come first, so that no worker begins a long one when the others are done.
- Tests marked `quiet` come last, on the one worker that is left when all others have ended.

The scheduler runs in the controller, which collects nothing: it has the names of the tests, in the order of the
workers, and no markers. So the workers leave it a file with the names of the quiet ones.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.exchange import PATIENCE

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# Files that take five seconds and more, longest first. One that is missing here costs time, never correctness.
HEAVIEST: tuple[str, ...] = (
    "compile/test_models.py",
    "elastic/hosts/test_hosts.py",
    "fuzz/test_fuzz.py",
    "elastic/test_training.py",
    "launch/test_start.py",
    "zero/test_bit_equal.py",
    "mismatch/test_mismatch.py",
    "torch_suite/test_distributed.py",
    "device/test_device.py",
    "ddp/test_several_wrappers.py",
    "launch/test_agent.py",
    "comm/failure/test_ends.py",
    "torch_suite/test_under_dist_autograd.py",
    "docs/test_docs.py",
    "test_cluster.py",
    "elastic/test_membership.py",
    "ddp/test_failed_pass.py",
    "comm/test_contract.py",
    "comm/hooks/test_average.py",
    "comm/test_faults.py",
    "cli/test_commands.py",
    "cli/test_output.py",
    "launch/test_interrupt.py",
    "elastic/test_in_place.py",
    "checkpoint/test_resume.py",
    "ddp/test_nested_backward.py",
    "launch/test_ending.py",
    "ddp/test_notices.py",
    "comm/hooks/test_training.py",
    "checkpoint/test_faults.py",
    "swap/test_swap.py",
    "comm/group/test_launchers.py",
    "remote/test_training.py",
    "ddp/test_failures.py",
    "cli/test_demo.py",
    "comm/group/test_torch_classes.py",
    "comm/memory/test_heap.py",
    "comm/hierarchical/test_namespaces.py",
    "checkpoint/test_storage.py",
)

# All files of these folders are one unit of work.
TOGETHER: tuple[str, ...] = ("tests/compile/",)

_PR_SET_PDEATHSIG = 1
# The unit of work that all quiet tests form; no file has this name.
_QUIET = "quiet"
# What the controller gives to each worker: where to leave the names of the quiet tests.
_NAMES_PATH = "phalanx_quiet_names"
_DIRECTORY = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def is_worker(config: pytest.Config) -> bool:
    """Whether this pytest process is one of several that a controller has started."""
    return hasattr(config, "workerinput")


def instruct(node: Any) -> None:
    """In the controller, before a worker starts: say where it leaves the names of quiet tests."""
    stash = node.config.stash
    if _DIRECTORY not in stash:
        stash[_DIRECTORY] = tempfile.TemporaryDirectory(prefix="phalanx-suite-")
    node.workerinput[_NAMES_PATH] = _names_path(node.config)


def end_with_controller() -> None:
    """In a worker: be killed when the controller is, test under way or not; the worker's ranks then end as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def sort(items: list[pytest.Item]) -> None:
    """In a worker: bring the tests into the order in which they are to be handed out."""
    places = {f"tests/{name}": place for place, name in enumerate(HEAVIEST)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        return _is_quiet(item), places.get(_file_of(item.nodeid), len(places))

    items.sort(key=place)


def extend_time_limits(items: Sequence[pytest.Item]) -> None:
    """In a worker: multiply the limits that are there to end a test that hangs, since the machine is shared."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout")
        if limit_s:
            item.add_marker(pytest.mark.timeout(PATIENCE * float(limit_s)), append=False)


def leave_quiet_names(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """In a worker, before the controller hears that it has collected."""
    path = Path(config.workerinput[_NAMES_PATH])  # type: ignore[attr-defined]
    # Every worker writes the same; renamed into place, as the controller reads when the last one reports.
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    mine.write_text("\n".join(item.nodeid for item in items if _is_quiet(item)))
    mine.rename(path)


def _names_path(config: pytest.Config) -> str:
    return f"{config.stash[_DIRECTORY].name}/quiet"


def _is_quiet(item: pytest.Item) -> bool:
    return item.get_closest_marker("quiet") is not None


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _unit_of(nodeid: str) -> str:
    """What is run by one worker: a file, or a whole folder."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), _file_of(nodeid))


def make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """The scheduler of a run on several workers."""
    # Imported here: without `-n` the suite runs where xdist is not installed.
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        """Files in the order of collection; all quiet tests are one more unit of work, for the last worker."""

        quiet_names: frozenset[str] = frozenset()

        def schedule(self) -> None:
            self.quiet_names = frozenset(Path(_names_path(config)).read_text().splitlines())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return _QUIET if nodeid in self.quiet_names else _unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if not self._only_quiet_left() or self.nodes == [node]:
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            others = [other for other in self.nodes if other is not node and not other.shutting_down]
            if self._only_quiet_left() and others:
                # It runs what it still has and ends; then comes `remove_node`.
                node.shutdown()
            else:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            crashed: str | None = super().remove_node(node)
            if self._only_quiet_left() and len(self.nodes) == 1:
                self._reschedule(self.nodes[0])
            return crashed

        def _only_quiet_left(self) -> bool:
            return list(self.workqueue) == [_QUIET]

    # Otherwise the files with the largest number of tests would come first.
    config.option.loadscopereorder = False
    return FileScheduling(config, log)
