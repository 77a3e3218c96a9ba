"""MPI's all_reduce timed by itself, for comparison; only where the packages `mpich` and `mpi4py` are installed.

MPI starts its own processes, so it cannot take turns with the others in one run. Imports neither torch nor phalanx:
these processes need nothing but a buffer.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BLOCK_BYTES = 100 << 20
ROOT = Path(__file__).resolve().parents[1]


def _launcher() -> str | None:
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def is_installed() -> bool:
    """Whether there is something to compare with."""
    return _launcher() is not None and importlib.util.find_spec("mpi4py") is not None


def time_all_reduces(world: int, sizes: Sequence[int], num_rounds: int) -> list[float]:
    """Milliseconds of an all_reduce of so many bytes, in place, by `world` processes: the median of the rounds."""
    launcher = _launcher()
    assert launcher is not None, "ask is_installed first"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ms.json"
        command = [launcher, "-n", str(world), sys.executable, "-m", "bench.mpi", str(path), str(num_rounds)]
        subprocess.run([*command, *map(str, sizes)], check=True, timeout=300, cwd=ROOT)
        found: list[float] = json.loads(path.read_text())
        return found


def _time_here(num_bytes: int, num_rounds: int) -> float:
    """One process's part: blocks of calls, as long as the slowest process takes for them."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    buffer = numpy.zeros(num_bytes // 4, dtype=numpy.float32)
    num_calls = max(4, min(1000, BLOCK_BYTES // num_bytes))
    taken = []
    for _ in range(num_rounds + 1):
        world.Barrier()
        started = time.perf_counter()
        for _ in range(num_calls):
            world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        taken.append(world.allreduce(time.perf_counter() - started, MPI.MAX) / num_calls)
    return 1e3 * statistics.median(taken[1:])


def main(path: str, num_rounds: str, *sizes: str) -> None:
    """One process, started by MPI's launcher."""
    from mpi4py import MPI

    found = [_time_here(int(size), int(num_rounds)) for size in sizes]
    if MPI.COMM_WORLD.Get_rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
