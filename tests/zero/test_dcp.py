"""torch.distributed.checkpoint's get_state_dict and set_state_dict on our wrapper and our sharded optimizer.

Plain keys, state in parts, and checkpoints that load on either side: torch's wrapper with a plain optimizer, ours with ZeRO.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx.zero.state.shards import boxes
from tests.cluster import run_ranks


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_in_order(sizes: list[int], data: st.DataObject) -> None:
    total = prod(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    numbered = torch.arange(total).view(sizes)
    found: list[int] = []
    for offsets, extents in boxes(start, stop, sizes):
        part = numbered
        for dim, (offset, extent) in enumerate(zip(offsets, extents, strict=True)):
            part = part.narrow(dim, offset, extent)
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


def _net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 5, 3), torch.nn.Flatten(), torch.nn.Linear(5 * 4, 7), torch.nn.Linear(7, 3))
    net[0].to(memory_format=torch.channels_last)
    return net


def _pair(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if kind == "torch":
        model: Any = TorchDDP(_net(seed))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    model = phalanx.DistributedDataParallel(_net(seed))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    if kind == "ours":
        return model, torch.optim.Adam(model.parameters(), **options)
    return model, phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, partition=kind, **options)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        batch = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def _weights(model: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.module.parameters()]


def _save_and_load(rank: int, world: int, folder: str, saving: str, loading: str) -> list[torch.Tensor]:
    model, optimizer = _pair(saving, seed=0)
    _train(model, optimizer, rank, range(3))
    before = _weights(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert sorted(model_state) == sorted(dict(model.module.named_parameters())), "plain names, without the wrapper's"
    assert sorted(optimizer_state["state"]) == sorted(model_state)
    assert all(map(torch.equal, before, _weights(model))), "asking has trained"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    other, resumed = _pair(loading, seed=9)
    model_state, optimizer_state = get_state_dict(other, resumed)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    _train(model, optimizer, rank, range(3, 6))
    _train(other, resumed, rank, range(3, 6))
    assert all(map(torch.equal, _weights(model), _weights(other))), "going on from the checkpoint is not going on"
    return _weights(other)


CASES = [("torch", "element"), ("element", "torch"), ("parameter", "element"), ("torch", "ours"), ("element", "parameter")]


@pytest.mark.parametrize(("saving", "loading"), CASES)
def test_a_checkpoint_loads_on_either_side(tmp_path: Path, saving: str, loading: str) -> None:
    leaks = ("groups", "threads") if "torch" in (saving, loading) else ()
    first, second = run_ranks(2, _save_and_load, str(tmp_path / "checkpoint"), saving, loading, allow_leaks=leaks)
    assert all(map(torch.equal, first, second))


def _in_parts(rank: int, world: int) -> tuple[int, int]:
    model, optimizer = _pair("element", seed=0)
    _train(model, optimizer, rank, range(2))
    _, state = get_state_dict(model, optimizer)
    shards = [value for each in state["state"].values() for value in each.values() if hasattr(value, "extents")]
    assert shards and all(shard.shape == model.module.get_parameter(name).shape for name, shard in _named(state, "exp_avg"))
    _, full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, value in _named(full, "exp_avg"):
        everyone = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(everyone, value.contiguous())
        assert torch.equal(everyone[0], everyone[1]), name
    held = sum(extent.values.numel() for shard in shards for extent in shard.extents)
    return held, sum(shard.numel() for shard in shards)


def _named(state: Any, key: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, each[key]) for name, each in state["state"].items()]


def test_every_rank_gives_its_own_part_and_whole_states_are_given_when_asked_for() -> None:
    (first, total), (second, _) = run_ranks(2, _in_parts)
    assert first + second == total and 0 < first < total
