"""Torch's own tests of DistributedDataParallel under distributed autograd, with ours in its place, on CPU tensors."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.cluster import Leak, run_ranks
from tests.torch_suite.body import substituted, unskipped

_RPC = "torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture"
# Four trainers; with a parameter server and a master beside them where the test asks for that.
_TESTS = {
    "DdpUnderDistAutogradTest.test_backward_no_ddp": 6,
    "DdpUnderDistAutogradTest.test_backward_ddp_outside": 6,
    "DdpUnderDistAutogradTest.test_backward_ddp_outside_uneven_inputs": 6,
    "DdpUnderDistAutogradTest.test_backward_ddp_inside": 6,
    "DdpComparisonTest.test_ddp_comparison": 4,
    "DdpComparisonTest.test_ddp_comparison_uneven_inputs": 4,
    "DdpComparisonTest.test_ddp_dist_autograd_sparse_grads": 4,
    "DdpComparisonTest.test_ddp_dist_autograd_local_vs_remote": 4,
    "CudaDdpComparisonTest.test_ddp_dist_autograd_local_vs_remote_gpu": 4,
}


def _run(rank: int, world: int, name: str, file_name: str, reference: bool) -> None:
    module = unskipped("ddp_under_dist_autograd_test")
    agent: Any = importlib.import_module(_RPC).TensorPipeRpcAgentTestFixture
    class_name, method = name.split(".")
    test_case: Any = importlib.import_module("torch.testing._internal.common_utils").TestCase
    case = type("TorchCase", (agent, getattr(module, class_name), test_case), {})(method)
    case.rank, case.file_name = rank, file_name
    with substituted(module, reference):
        getattr(case, method)()


# Where there is no wrapper of ours, where CUDA means the CPU that another test has already, and what the same test does with
# uneven inputs, or inside of another model, as well.
_OTHERS = (
    "DdpUnderDistAutogradTest.test_backward_ddp_outside_uneven_inputs",
    "DdpComparisonTest.test_ddp_comparison_uneven_inputs",
    "DdpComparisonTest.test_ddp_dist_autograd_local_vs_remote",
    "DdpUnderDistAutogradTest.test_backward_ddp_outside",
    "DdpComparisonTest.test_ddp_comparison",
    "DdpUnderDistAutogradTest.test_backward_no_ddp",
    "CudaDdpComparisonTest.test_ddp_dist_autograd_local_vs_remote_gpu",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in _OTHERS else name for name in _TESTS]
)
def test_torch(name: str, tmp_path: Any) -> None:
    reference = os.environ.get("TORCH_SUITE_REFERENCE") == "1"
    # Torch's rpc keeps threads and shared memory after its shutdown.
    leaks = [Leak.THREADS, Leak.NATIVE_THREADS, Leak.MEMFD, Leak.GROUPS]
    file_name = str(tmp_path / "rendezvous")
    # The master calls trainers as soon as its own group is made; theirs must be as well.
    env = {"TORCH_DIST_INIT_BARRIER": "1"}
    run_ranks(_TESTS[name], _run, name, file_name, reference, backend=None, env=env, allow_leaks=leaks)
