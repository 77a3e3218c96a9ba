"""The swap: an unmodified script trains on phalanx to the same weights, in this process and in those it starts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch import variables
from phalanx.swap import install, uninstall
from phalanx.swap.groups import swapped_backend
from phalanx.swap.install import SWAP
from tests.cluster import Leak, run_ranks
from tests.cluster.command import run_command
from tests.cluster.process import SEARCH_PATH
from tests.swap import script

SCRIPT = Path(script.__file__)


def _launch(folder: Path, *options: str) -> list[dict[str, Any]]:
    folder.mkdir()
    program = "from phalanx.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--nproc", "2", "--run-dir", str(folder / "runs"), *options]
    env = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    done = run_command([*command, str(SCRIPT), str(folder)], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def _reference(rank: int, world: int, folder: str) -> None:
    script.main(folder, with_child=False)


@pytest.mark.timeout(180)
def test_an_unmodified_script_under_swap_has_the_same_weights(tmp_path: Path) -> None:
    run_ranks(2, _reference, str(tmp_path), backend=None, allow_leaks=tuple(Leak))
    plain = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    swapped = _launch(tmp_path / "swapped", "--swap")
    found = json.loads(swapped[0]["found"])
    assert found == {
        "backend": "phalanx",
        "wrapper": "phalanx.ddp.module",
        "optimizer": "phalanx.zero.optimizer",
        "child": ["phalanx.ddp.module"] * 2,
    }
    assert json.loads(plain[0]["found"])["wrapper"].startswith("torch.")
    for mine, reference in zip(swapped, plain, strict=True):
        assert all(torch.equal(mine["weights"][name], reference["weights"][name]) for name in reference["weights"])


def _inside(rank: int, world: int) -> list[str]:
    import torch.distributed as dist
    import torch.nn.parallel as parallel
    from torch.nn.parallel import distributed

    before = parallel.DistributedDataParallel
    early = types.ModuleType("an_early_bird")
    early.DDP = before  # type: ignore[attr-defined]
    sys.modules["an_early_bird"] = early
    try:
        with pytest.warns(UserWarning, match=r"an_early_bird \(DDP\)"):
            install()
        install()  # again: nothing
        ours = parallel.DistributedDataParallel
        assert ours is distributed.DistributedDataParallel and issubclass(ours, before) and ours is not before
        assert early.DDP is before
        # Imported after the swap or before it: these mean torch's own.
        for name in ("torch.distributed._composable.replicate", "torch._dynamo.convert_frame"):
            assert importlib.import_module(name).DistributedDataParallel is before
        group = dist.new_group(backend="gloo")
        names = [dist.get_backend(group), type(ours(torch.nn.Linear(2, 2))).__module__]
        dist.destroy_process_group(group)
    finally:
        del sys.modules["an_early_bird"]
        uninstall()
    assert parallel.DistributedDataParallel is before and "PHALANX_SWAP" not in os.environ
    return names


def test_install_names_what_was_imported_too_early_and_can_be_taken_back() -> None:
    for names in run_ranks(2, _inside, allow_leaks=tuple(Leak)):
        assert names == ["phalanx", "phalanx.ddp.module"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("gloo", "phalanx"),
        ("GLOO", "phalanx"),
        (None, "phalanx"),
        ("cpu:gloo,cuda:nccl", "cpu:phalanx,cuda:nccl"),
        ("nccl", "nccl"),
        ("mpi", "mpi"),
        ("phalanx", "phalanx"),
    ],
)
def test_only_gloo_is_swapped(asked: str | None, given: str) -> None:
    if asked is None and torch.cuda.is_available():
        given = "cpu:phalanx,cuda:nccl"
    assert swapped_backend(asked) == given


@pytest.mark.thorough
@pytest.mark.timeout(60)
def test_the_backend_is_known_without_an_import_of_ours(tmp_path: Path) -> None:
    """By the entry point that torch looks for at the end of its own import; installed as pip would have it."""
    info = tmp_path / "phalanx-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nphalanx = phalanx_backend:autoload\n")
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "assert 'phalanx' not in sys.modules\n"
        "dist.init_process_group('phalanx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "tensor = torch.ones(3); dist.all_reduce(tensor); print(dist.get_backend(), tensor.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SEARCH_PATH])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["phalanx", "[1.0,", "1.0,", "1.0]"], done.stderr


def test_the_launcher_and_its_workers_mean_the_same_variable() -> None:
    assert variables.SWAP == SWAP
