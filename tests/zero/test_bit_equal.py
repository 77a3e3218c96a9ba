"""Every optimizer, sharded on 1 to 4 ranks, moves parameters bit for bit as it does alone on the same mean gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import (
    ELEMENTWISE,
    VARIANTS,
    Given,
    Optimizer,
    differing,
    mean_gradients,
    own_gradients,
    sample,
    set_gradients,
)

pytestmark = pytest.mark.timeout(100)

# After five steps RAdam begins to correct its variance and ASGD to average: before and after the save.
STEPS, SAVED_AT = 9, 6
BY_NAME = {case.name: case for case in (*ELEMENTWISE, *VARIANTS)}


def reference(case: Optimizer) -> tuple[list[list[torch.Tensor]], dict[str, Any]]:
    """Parameters after each step of the plain optimizer, and its state at the end."""
    model = Given()
    plain = case.plain(model)
    found = []
    for step in range(STEPS):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        plain.step()
        found.append(sample(model))
    return found, plain.state_dict()


class Run:
    """Sharded training on one group of ranks."""

    def __init__(self, case: Optimizer, group: Any, overlapped: bool, **options: Any) -> None:
        self.model = Given()
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.wrapped: Any = None
        if overlapped:
            self.wrapped = phalanx.DistributedDataParallel(
                self.model, process_group=group, bucket_cap_mb=0.0025, on_unused="ignore"
            )
        self.zero = ZeroRedundancyOptimizer(
            self.model.parameters(), case.make, group, overlap_with_ddp=overlapped, **options, **case.options
        )

    def step(self, step: int) -> None:
        self.zero.zero_grad()
        if self.wrapped is None:
            set_gradients(list(self.model.parameters()), mean_gradients(self.model, step))
        else:
            self.wrapped(own_gradients(self.model, step, self.rank, self.world)).backward()
        self.zero.step()


def same_state(ours: dict[str, Any], plain: dict[str, Any]) -> bool:
    groups = ours["param_groups"] == plain["param_groups"]
    states = ours["state"].keys() == plain["state"].keys()
    for index, expected in plain["state"].items():
        got = ours["state"][index]
        states &= got.keys() == expected.keys()
        for key, value in expected.items():
            states &= torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
    return bool(groups and states)


def train(rank: int, world: int, backend: str, names: list[str], sizes: list[int], mode: dict[str, Any]) -> list[str]:
    """What went wrong. Each size is trained through, and its state at the middle resumed on the next one."""
    groups = {size: dist.new_group(list(range(size)), backend=backend) for size in sizes}
    wrong: list[str] = []
    for name in names:
        case = BY_NAME[name]
        expected, final = reference(case)
        saved: list[Any] = [None] * len(sizes)
        for place, size in enumerate(sizes):
            if rank < size:
                wrong += _through(case, groups[size], mode, expected, final, saved, place)
        dist.broadcast_object_list(saved, src=0)
        for size, state in zip(sizes, [*saved[1:], saved[0]], strict=True):
            if rank < size:
                wrong += _resumed(case, groups[size], mode, expected, state)
    return wrong


def _through(
    case: Optimizer, group: Any, mode: dict[str, Any], expected: list[Any], final: Any, saved: list[Any], place: int
) -> list[str]:
    run = Run(case, group, **mode)
    where = f"{case.name} {mode} on {run.world}"
    for step in range(STEPS):
        run.step(step)
        if different := differing(run.model, expected[step]):
            return [f"{where}: step {step}: parameters {different}"]
        if step == SAVED_AT - 1:
            run.zero.consolidate_state_dict(to=0)
            saved[place] = run.zero.state_dict() if run.rank == 0 else None
    run.zero.consolidate_state_dict(to=run.world - 1)
    if run.rank == run.world - 1 and not same_state(run.zero.state_dict(), final):
        return [f"{where}: the state is not that of the plain optimizer"]
    return []


def _resumed(case: Optimizer, group: Any, mode: dict[str, Any], expected: list[Any], state: Any) -> list[str]:
    run = Run(case, group, **mode)
    with torch.no_grad():
        for param, value in zip(run.model.parameters(), expected[SAVED_AT - 1], strict=True):
            param.copy_(value)
    run.zero.load_state_dict(state)
    for step in range(SAVED_AT, STEPS):
        run.step(step)
    different = differing(run.model, expected[-1])
    return [f"{case.name} {mode} resumed on {run.world}: parameters {different}"] if different else []


overlapping = pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
partitions = pytest.mark.parametrize("partition", ["element", "parameter"])


def on_ranks(names: list[str], sizes: list[int], overlapped: bool, **options: Any) -> None:
    # Several processes on few cores: gloo would be much slower with the many small collectives of overlapped steps.
    backend = "phalanx" if overlapped else "gloo"
    world, mode = max(sizes), {"overlapped": overlapped, **options}
    assert run_ranks(world, train, backend, names, sizes, mode, backend=backend, timeout_s=90) == [[]] * world


def test_each_optimizer() -> None:
    """Overlapped, which makes the most of its being elementwise; alone, a few in `test_each_mode`, all of them thorough."""
    on_ranks([case.name for case in ELEMENTWISE], [2], overlapped=True)


@pytest.mark.thorough  # the fuzzer draws whole parameters on one to four ranks
@overlapping
def test_whole_parameters_on_one_and_four_ranks(overlapped: bool) -> None:
    """Whose optimizer need not act element by element: a few of those that can be compared say as much as all."""
    on_ranks(["SGD", "AdamW", "ASGD"], [4, 1], overlapped, partition="parameter")


@pytest.mark.thorough
@overlapping
@partitions
def test_each_optimizer_on_one_to_four_ranks(overlapped: bool, partition: str) -> None:
    on_ranks([case.name for case in ELEMENTWISE], [1, 2, 3, 4], overlapped, partition=partition)


@overlapping
@pytest.mark.thorough  # the fuzzer crosses optimizers with parameters in buckets
@pytest.mark.parametrize("sizes", [[2], [3, 2]], ids=str)
def test_each_variant_through_shared_memory_with_parameters_in_buckets(overlapped: bool, sizes: list[int]) -> None:
    mode = {"overlapped": overlapped, "parameters_as_bucket_view": True}
    names, world = [case.name for case in VARIANTS], max(sizes)
    assert run_ranks(world, train, "phalanx", names, sizes, mode, backend="phalanx", timeout_s=90) == [[]] * world


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    "mode",
    [
        {"overlapped": True, "stage": 2},
        {"overlapped": True, "stage": 2, "step_in_backward": False},
        {"overlapped": True, "step_in_backward": False},
        {"overlapped": False, "stage": 2},
        {"overlapped": False, "shared_parameters": True},
        {"overlapped": True, "shared_parameters": True},
        {"overlapped": True, "shared_parameters": True, "step_in_backward": False},
    ],
    ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()),
)
@pytest.mark.parametrize("name", ["AdamW", pytest.param("SGD", marks=pytest.mark.thorough)])
def test_each_mode(name: str, backend: str, mode: dict[str, Any]) -> None:
    assert run_ranks(3, train, backend, [name], [3, 2], mode, backend=backend, timeout_s=60) == [[]] * 3
