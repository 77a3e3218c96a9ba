"""torch.distributed.checkpoint: every rank saves its own part, and any number of ranks loads it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import optim

import phalanx
from phalanx.errors import StateError
from phalanx.zero import ZeroRedundancyOptimizer
from phalanx.zero.state.checkpoint import ShardedLeaf
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, sample, set_gradients

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def advance(model: Given, one: optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        one.step()


def plainly(steps: int, make: Any = optim.AdamW) -> Given:
    model = Given()
    advance(model, make(model.parameters(), lr=0.01), range(steps))
    return model


def save(rank: int, world: int, folder: str, partition: str, name: str) -> int:
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), getattr(optim, name), lr=0.01, partition=partition)
    advance(model, zero, range(5))
    sizes: list[int] = []
    collectives = zero._sharded.collectives
    gather = collectives.all_gather
    collectives.all_gather = lambda out, own: sizes.append(out.numel()) or gather(out, own)  # type: ignore[method-assign]
    state = zero.sharded_state_dict()
    dcp.save({"zero": {"optimizer": state}, "model": model.state_dict()}, checkpoint_id=folder)
    held = sum(extent.values.numel() for leaf in state.values() if isinstance(leaf, ShardedLeaf) for extent in leaf.extents)
    # Only texts about what the states look like were exchanged.
    assert max(sizes) < 20_000
    return held


def load(rank: int, world: int, folder: str, partition: str, name: str, overlapped: bool) -> list[int]:
    model = Given()
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0025, on_unused="ignore") if overlapped else None
    zero = ZeroRedundancyOptimizer(
        model.parameters(), getattr(optim, name), partition=partition, overlap_with_ddp=overlapped, lr=0.5
    )
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    model.load_state_dict(weights)
    zero.load_sharded_state_dict(folder, prefix="zero.optimizer")
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.01
    if wrapped is None:
        advance(model, zero, range(5, 9))
    else:
        for step in range(5, 9):
            zero.zero_grad()
            wrapped(mean_gradients(model, step)).backward()
    return differing(model, sample(plainly(9, getattr(optim, name))))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_saved_by_three_ranks_and_loaded_by_others(tmp_path: Path, name: str, backend: str) -> None:
    folder = str(tmp_path / "checkpoint")
    held = run_ranks(3, save, folder, "element", name, backend=backend)
    assert max(held) - min(held) <= 8
    for world, partition, overlapped in ((2, "element", False), (3, "parameter", False), (4, "element", True)):
        assert run_ranks(world, load, folder, partition, name, overlapped, backend=backend) == [[]] * world
    shutil.rmtree(folder)
    run_ranks(2, save, folder, "parameter", name, backend=backend)
    assert run_ranks(1, load, folder, "element", name, False) == [[]]


def save_matrix(rank: int, world: int, folder: str) -> Any:
    """A state with leaves that are not of the parameter's shape."""
    shapes = ((13, 10), (33, 9), (257,))
    models = [Given(shapes), Given(shapes)]
    plain = optim.Adafactor(models[0].parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(models[1].parameters(), optim.Adafactor, lr=0.01)
    for step in (0, 1):
        for model, one in zip(models, (plain, zero), strict=True):
            set_gradients(list(model.parameters()), mean_gradients(model, step))
            one.step()
    dcp.save(zero.sharded_state_dict(), checkpoint_id=folder)
    other = ZeroRedundancyOptimizer(models[1].parameters(), optim.Adafactor, lr=0.9)
    other.load_sharded_state_dict(dcp.FileSystemReader(folder))
    for model, one in zip(models, (plain, other), strict=True):
        set_gradients(list(model.parameters()), mean_gradients(model, 3))
        one.step()
    return differing(models[1], sample(models[0]))


def test_states_of_any_shape_and_a_reader_of_the_users(tmp_path: Path) -> None:
    assert run_ranks(2, save_matrix, str(tmp_path / "checkpoint")) == [[]] * 2


def load_broken(rank: int, world: int, folder: str) -> list[int]:
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
    advance(model, zero, range(5))
    prefix = "zero.optimizer"

    def refuse(words: str, place: str = folder, prefix: str = prefix, one: Any = zero) -> None:
        with pytest.raises(StateError, match=words):
            one.load_sharded_state_dict(place, prefix=prefix)

    refuse("cannot be read", folder + "-elsewhere")
    refuse("has no 'layout'", prefix="")
    refuse("has no 'nothing.layout'", prefix="nothing")
    others = ZeroRedundancyOptimizer(Given(((70,), (13, 10))).parameters(), optim.AdamW, lr=0.01)
    refuse("groups of", one=others)
    shapes = ((70,), (10, 13), (6,), (), (257,), (3, 4, 5), (4, 3, 2, 2), (33, 9), (0,))
    refuse("parameter 1 of group 0 has shape", one=ZeroRedundancyOptimizer(Given(shapes).parameters(), optim.AdamW))
    refuse("not a state of SGD", one=ZeroRedundancyOptimizer(Given().parameters(), optim.SGD, lr=0.1))
    with pytest.raises(TypeError, match="not a dict"):
        zero.load_sharded_state_dict(zero.sharded_state_dict())
    damaged = folder + "-damaged"
    if rank == 0:
        shutil.copytree(folder, damaged)
        for file in Path(damaged).glob("*.distcp"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    dist.barrier()
    refuse("truncated or damaged", damaged)
    advance(model, zero, range(5, 7))
    return differing(model, sample(plainly(7)))


def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, save, folder, "element", "AdamW")
    assert run_ranks(2, load_broken, folder) == [[]] * 2


def read_as_whole(rank: int, world: int) -> None:
    model = Given()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
    advance(model, zero, range(1))
    leaf = zero.sharded_state_dict()["state.1.exp_avg"]
    assert leaf.shape == (130,) and "held here" in repr(leaf)
    with pytest.raises(StateError, match=r"only torch\.distributed\.checkpoint can read"):
        torch.sum(leaf)


def test_a_part_of_a_state_cannot_be_mistaken_for_a_whole_one() -> None:
    run_ranks(2, read_as_whole)
