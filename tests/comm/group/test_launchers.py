"""The backend in programs of users: under each launcher, with or without saying goodbye, from a plain `import phalanx`."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster import PATIENCE, reserved_port
from tests.cluster.command import run_command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(90)

SCRIPT = textwrap.dedent(
    """
    import os, sys
    import torch, torch.distributed as dist
    import phalanx

    assert dist.Backend.PHALANX == "phalanx"

    def main(rank=None, world=None):
        if rank is not None:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("phalanx")
        tensor = torch.full((100_000,), dist.get_rank() + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.eq(3).all()
        print("ok", flush=True)
        if "destroy" in sys.argv:
            dist.destroy_process_group()
        # Without it, the lane's thread and the group have to go by themselves.

    if __name__ == "__main__":
        if "spawn" in sys.argv:
            torch.multiprocessing.spawn(main, (2,), 2)
        else:
            main()
    """
)


def _run_script(folder: Path, *command: str, **variables: str) -> str:
    """The output of a program that must end well, in time, without a word of an error."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"} | variables
    done = run_command(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "terminate" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.thorough  # each of its workers imports torch; that ranks meet under it is in launch/test_joining.py
@pytest.mark.parametrize("ending", ["leave", "destroy"])
def test_under_torchrun(tmp_path: Path, ending: str) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py", ending)
    assert _run_script(tmp_path, *command).count("ok") == 2


@pytest.mark.thorough  # children of multiprocessing are in failure/test_ends.py
def test_under_torch_multiprocessing(tmp_path: Path) -> None:
    with reserved_port() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert _run_script(tmp_path, "script.py", "spawn", "leave", **meeting).count("ok") == 2


@pytest.mark.parametrize("ending", [pytest.param("destroy", marks=pytest.mark.thorough), "leave"])
def test_under_phalanx_run(tmp_path: Path, ending: str) -> None:
    command = ("-m", "phalanx.cli.main", "run", "--nproc", "2", "script.py", ending)
    assert _run_script(tmp_path, *command).count("ok") == 2
