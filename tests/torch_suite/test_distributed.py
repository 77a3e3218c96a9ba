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


# For `make test-thorough`: those that take longest, each beside others about the same, or in rooms of our own tests.
LONG = {
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_compile_static_graph",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_uneven_inputs",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    # These differ from another one only in what the CPU does not have, or in a setting.
    "test_DistributedDataParallel_non_default_stream",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
}
NAMES = [name for name in ddp_tests() if name not in LEFT_OUT]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LONG else name for name in NAMES]
)
def test_torch(name: str) -> None:
    skipped = run_ranks(RANKS.get(name, 2), run_torch_test, name, _REFERENCE, timeout_s=100)
    assert skipped == [None] * len(skipped), f"skipped itself: {skipped}. Name it in left_out.py."


def test_every_test_left_out_exists() -> None:
    assert set(LEFT_OUT) <= set(ddp_tests()) and set(NAMES) >= LONG
