"""Other people's training loops on phalanx: final weights bit-identical to torch's own wrapper, checkpoints interchangeable.

Run by `make test-integrations`, in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Leak, run_ranks
from tests.cluster.process import SEARCH_PATH
from tests.integrations import programs

# Frameworks keep groups, threads and settings for the life of their process; the workers are replaced after each call. One
# that is killed leaves the semaphores of its progress bars.
EVERYTHING = tuple(Leak)
pytestmark = [pytest.mark.timeout(600), pytest.mark.allow_leaks(*EVERYTHING)]


def _run(program: Callable[..., Any], side: str, folder: Path, *arguments: Any) -> list[list[torch.Tensor]]:
    own = folder / side
    own.mkdir(parents=True, exist_ok=True)
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    return run_ranks(2, program, side, str(own), *arguments, backend=None, timeout_s=400, allow_leaks=EVERYTHING, env=env)


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _compare(program: Callable[..., Any], folder: Path, *arguments: Any) -> None:
    torchs = _run(program, "torch", folder, *arguments)
    ours = _run(program, "phalanx", folder, *arguments)
    # Rank by rank: statistics of batch norm are each rank's own after the last forward.
    for rank, (mine, reference) in enumerate(zip(ours, torchs, strict=True)):
        assert _same(mine, reference), f"rank {rank}: not what torch's own wrapper makes of it"


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def _swap_checkpoints(program: Callable[..., Any], folder: Path, name: str, *arguments: Any) -> None:
    """What torch's run had saved halfway, ours goes on from, and the other way round."""
    of_torch, of_ours = (os.path.join(folder, side, name) for side in ("torch", "phalanx"))
    ours = _run(program, "phalanx", folder / "swapped", *arguments, of_torch)
    torchs = _run(program, "torch", folder / "swapped", *arguments, of_ours)
    for rank, (mine, reference) in enumerate(zip(ours, torchs, strict=True)):
        assert _same(mine, reference), f"rank {rank}"


@_needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    _compare(programs.accelerate_loop, tmp_path)
    _swap_checkpoints(programs.accelerate_loop, tmp_path, "middle")


@_needs("transformers")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_trainer(tmp_path: Path, kind: str) -> None:
    _compare(programs.transformers_trainer, tmp_path, kind)
    _swap_checkpoints(programs.transformers_trainer, tmp_path, f"{kind}/checkpoint-3", kind)


@_needs("lightning")
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_trainer(tmp_path: Path, manual: bool) -> None:
    _compare(programs.lightning_trainer, tmp_path, manual)
    _swap_checkpoints(programs.lightning_trainer, tmp_path, "lightning.ckpt", manual)


@_needs("lightning")
def test_fabric(tmp_path: Path) -> None:
    _compare(programs.fabric_loop, tmp_path)
    _swap_checkpoints(programs.fabric_loop, tmp_path, "fabric.ckpt")


@_needs("timm")
def test_timm_loop(tmp_path: Path) -> None:
    _compare(programs.timm_loop, tmp_path)


@_needs("ray")
def test_ray_train(tmp_path: Path) -> None:
    for side in ("torch", "phalanx"):
        command = [sys.executable, str(Path(__file__).with_name("ray_program.py")), side, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": SEARCH_PATH}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    torchs, ours = (torch.load(tmp_path / f"{side}.pt") for side in ("torch", "phalanx"))
    assert list(torchs) == list(ours) and all(torch.equal(torchs[name], ours[name]) for name in torchs)
