"""Freed memory stays in the process, unless the user has said what is to become of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.comm.memory.heap import keep_freed_memory
from tests.cluster import PATIENCE

PROGRAM = """
import os, resource, sys, torch
from phalanx.comm.memory.heap import keep_freed_memory

torch.set_num_threads(1)
kept = keep_freed_memory(os.environ) if sys.argv[1] == "set" else None
if sys.argv[1] == "wrap":
    import phalanx

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 2))
count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(1 << 20) for _ in range(20)]  # 80 MB in blocks of 4

for _ in range(3):
    step()
before = count()
for _ in range(5):
    step()
print(kept, (count() - before) // 5)
"""


def run(how: str, environ: dict[str, str]) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, how]
    answer = subprocess.run(
        command, env={**clean, **environ}, capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    )
    kept, faults = answer.stdout.split()
    return kept, int(faults)


glibc = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


@pytest.mark.thorough
@glibc
def test_with_a_wrapper_a_step_takes_hardly_a_fault_for_memory_it_had_before() -> None:
    assert run("wrap", {})[1] < 200
    # What glibc does by itself depends on what else lies in the heap; told to map every block, it always does.
    assert run("leave", {"MALLOC_MMAP_THRESHOLD_": "131072"})[1] > 5000, "faults are counted"


@glibc
@pytest.mark.thorough  # what the wrapper does, in one more process
def test_without_one_it_can_be_asked_for() -> None:
    kept, faults = run("set", {})
    assert kept == "True"
    assert faults < 200


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
        {"PHALANX_KEEP_FREED": "0"},
    ],
    ids=str,
)
def test_what_the_user_has_set_stays(environ: dict[str, str]) -> None:
    assert keep_freed_memory(environ) is False
