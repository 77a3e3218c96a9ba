"""Torch's own tests of its DistributedOptimizer, run with ours in its place, and held to equal bits.

The tests of DDP under distributed autograd are run by tests/torch_suite/test_under_dist_autograd.py.
"""

from __future__ import annotations

import importlib
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.remote as remote
from tests.cluster import spawn_ranks
from tests.remote.world import checked

NAMES = [
    "test_dist_optim",
    "test_dist_optim_exception",
    "test_dist_optim_exception_on_constructor",
    "test_dist_optim_none_grads",
]
_FOLDER = "torch.testing._internal.distributed.rpc"


class Bits(unittest.TestCase):
    """Torch's cases compare tensors with tolerances; here they must be equal."""

    __test__ = False

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        assert torch.equal(first, second), (first, second)

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        assert not torch.equal(first, second), first


def run_case(rank: int, world: int, name: str, meeting: str) -> list[str]:
    """One rank of torch's test; the names of all tests there are."""
    suite: Any = importlib.import_module(f"{_FOLDER}.dist_optimizer_test")
    agent: Any = importlib.import_module(f"{_FOLDER}.tensorpipe_rpc_agent_test_fixture")
    # The shared-memory transport keeps its memory after RPC is shut down.
    agent.tp_transports = lambda: ["uv"]
    suite.DistributedOptimizer = remote.DistributedOptimizer
    case = type("Case", (agent.TensorPipeRpcAgentTestFixture, suite.DistOptimizerTest, Bits), {})(name)
    case.rank, case.file_name = rank, meeting
    assert case.world_size == world
    getattr(case, name)()
    return sorted(found for found in dir(suite.DistOptimizerTest) if found.startswith("test_"))


# Our own tests have the others' subjects: errors of owners, and gradients that are missing.
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in NAMES[1:])])
def test_torchs_own_test_passes_with_our_class(name: str, tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    assert checked(spawn_ranks(4, run_case, name, meeting, backend=None)) == [NAMES] * 4
