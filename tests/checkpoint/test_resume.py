"""A run that was stopped and resumed is, to the bit, the run that was not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.storage.disk import Disk
from phalanx.checkpoint.storage.library import entries
from tests.checkpoint.runs import Run, differing
from tests.cluster import run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(90)


def straight(rank: int, world: int, options: dict[str, Any], num_steps: int) -> dict[str, torch.Tensor]:
    run = Run(rank, world, **options)
    run.train(num_steps)
    return run.state()


def train_and_die(rank: int, world: int, options: dict[str, Any], num_steps: int, folder: str) -> None:
    run = Run(rank, world, **options)
    checkpointer = run.checkpointer(folder)
    run.train(num_steps)
    checkpointer.save(num_steps, {"loss": 1.0 / num_steps})
    # Together: one that is still in save() would hear of the other's death, and raise.
    Path(f"{folder}-{rank}").touch()
    while not all(Path(f"{folder}-{other}").exists() for other in range(world)):
        time.sleep(0.001)
    # Copied, and hardly written: the writer goes on without us.
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank: int, world: int, options: dict[str, Any], num_steps: int, folder: str) -> None:
    run = Run(rank, world, **options)
    with run.checkpointer(folder) as checkpointer:
        run.train(num_steps)
        checkpointer.save(num_steps)
        run.train(1)  # what was copied is not what is there when it is written


def resume(
    rank: int, world: int, options: dict[str, Any], num_steps: int, folder: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    run = Run(rank, world, **options)
    torch.manual_seed(999)
    with run.checkpointer(folder) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        run.train(num_steps - restored.step)
    return run.state(), restored.left_out


def resumed_like_straight(world: int, options: dict[str, Any], folder: str, backend: str, steps: int, at: int) -> None:
    expected = run_ranks(world, straight, options, steps, backend=backend)
    run_ranks(world, stop, options, at, folder, backend=backend)
    found = run_ranks(world, resume, options, steps, folder, backend=backend)
    for rank, (state, left_out) in enumerate(found):
        assert (rank, left_out, differing(state, expected[rank])) == (rank, [], [])


def _wait_for_commit(folder: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(entry.commit for entry in entries(Disk(), str(folder))):
        assert time.monotonic() < deadline, "the writers did not commit after their ranks were killed"
        time.sleep(0.02)


def test_forty_steps_are_twenty_a_kill_and_twenty(tmp_path: Path) -> None:
    options = {"hook": "int8", "optimizer": "overlapped"}
    expected = run_ranks(2, straight, options, 40)
    killed = spawn_ranks(2, train_and_die, options, 20, str(tmp_path))
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2
    _wait_for_commit(tmp_path)
    for rank, (state, left_out) in enumerate(run_ranks(2, resume, options, 40, str(tmp_path))):
        assert (rank, left_out, differing(state, expected[rank])) == (rank, [], [])


@pytest.mark.parametrize(
    ("world", "backend", "options"),
    [
        (3, "phalanx", {"hook": "int8"}),
        pytest.param(3, "gloo", {}, marks=pytest.mark.thorough),
        (3, "phalanx", {"stage": 2}),
        pytest.param(2, "phalanx", {"optimizer": "plain", "hook": "topk"}, marks=pytest.mark.thorough),
        (2, "gloo", {"optimizer": "plain", "hook": "powersgd"}),
        (3, "phalanx", {"optimizer": "alone", "partition": "parameter"}),
        (2, "phalanx", {"optimizer": "alone", "shared_parameters": True}),
        pytest.param(2, "gloo", {"optimizer": "plain", "static_graph": True}, marks=pytest.mark.thorough),
        (2, "gloo", {"optimizer": "in_backward"}),
        (1, "gloo", {"optimizer": "overlapped"}),
        pytest.param(3, "gloo", {"optimizer": "alone", "optimizer_class": "Adagrad"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_resumed_is_like_not_stopped(tmp_path: Path, world: int, backend: str, options: dict[str, Any]) -> None:
    resumed_like_straight(world, options, str(tmp_path), backend, steps=9, at=5)


def back_and_again(rank: int, world: int, options: dict[str, Any], folder: str) -> list[str]:
    run = Run(rank, world, **options)
    with run.checkpointer(folder) as checkpointer:
        run.train(3)
        checkpointer.save(3)
        run.train(3)
        expected = run.state()
        checkpointer.restore()
        run.train(3)
    return differing(expected, run.state())


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "alone", "shared_parameters": True}, {"optimizer": "overlapped", "hook": "int8"}, {"stage": 2}],
    ids=str,
)
def test_going_back_within_a_run(tmp_path: Path, options: dict[str, Any]) -> None:
    assert run_ranks(2, back_and_again, options, str(tmp_path), backend="phalanx") == [[], []]


# -- another number of ranks -----------------------------------------------------------------------


def go_on(rank: int, world: int, options: dict[str, Any], folder: str, save_at: int | None) -> dict[str, torch.Tensor]:
    """Restore, train three steps, and save at the end if asked to."""
    run = Run(rank, world, **options)
    with run.checkpointer(folder) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        run.train(3)
        if save_at is not None:
            checkpointer.save(save_at)
    return run.state()


def by_hand(rank: int, world: int, options: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """The same from the same state, put in by torch's own means: a plain optimizer, whole tensors."""
    run = Run(rank, world, **{**options, "optimizer": "plain"})
    with run.checkpointer(folder) as checkpointer:
        assert checkpointer.restore() is not None
        run.train(3)
    return run.state()


def test_four_ranks_then_two_then_three(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(4, stop, {"optimizer": "overlapped"}, 4, folder, backend="phalanx")
    for world, options, save_at in (
        (2, {"optimizer": "alone", "partition": "parameter"}, 7),
        (3, {"optimizer": "overlapped"}, None),
    ):
        # Shared memory adds ranks in their order wherever an element lies; gloo's order depends on the buckets, which
        # are other ones with another optimizer.
        expected = run_ranks(world, by_hand, options, folder, backend="phalanx")
        found = run_ranks(world, go_on, options, folder, save_at, backend="phalanx")
        for rank in range(world):
            assert (world, rank, differing(found[rank], expected[rank])) == (world, rank, [])


def residuals(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model._hook[0].residuals.named().items()}


def saved_residuals(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    run = Run(rank, world, hook="int8", optimizer="plain")
    with run.checkpointer(folder) as checkpointer:
        run.train(4)
        checkpointer.save(4)
        return residuals(run)


def loaded_residuals(rank: int, world: int, folder: str) -> tuple[dict[str, torch.Tensor], list[str], int, float]:
    run = Run(rank, world, hook="int8", optimizer="plain")
    with run.checkpointer(folder) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
    return residuals(run), restored.left_out, run.loader.position, torch.rand(()).item()


def test_what_each_rank_has_for_itself_is_shared_out_to_another_number(tmp_path: Path) -> None:
    saved = run_ranks(2, saved_residuals, str(tmp_path))
    mean = {name: (saved[0][name] + saved[1][name]) / 2 for name in saved[0]}
    assert any(bool(value.any()) for value in mean.values())
    found = run_ranks(3, loaded_residuals, str(tmp_path))
    again = run_ranks(3, loaded_residuals, str(tmp_path))
    for rank, (mine, left_out, position, _) in enumerate(found):
        torch.testing.assert_close(mine, mean, rtol=0, atol=0)
        assert position == 4 * 4 * 2  # in samples of all ranks
        said = " ".join(left_out)
        assert "plan: of another number of ranks" in said and "loader: saved by 2 ranks" in said
        assert ("there was no rank 2" in said) == (rank == 2)
    # Every rank draws its own numbers, the same whenever it is restored.
    drawn = [one[3] for one in found]
    assert len(set(drawn)) == 3 and drawn == [one[3] for one in again]
