"""Buffers: from rank 0 before forward, by a hook before or after, at the start, ignored, renamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.ddp.features.buffers import BufferHookLocation
from phalanx.errors import MismatchError, PhalanxError
from tests.cluster import run_ranks


class Counting(nn.Module):
    """Each forward shows the buffer as it found it, then makes it the rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layer = nn.Linear(2, 2)
        self.register_buffer("level", torch.tensor([float(rank)]))
        self.register_buffer("kept", torch.tensor([float(rank)]))
        self.register_buffer("flags", torch.tensor([rank % 2 == 0, True]))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.level.item())
        self.level += 10 * (self.rank + 1)
        return self.layer(x)


def seen_levels(rank: int, world: int, mode: str) -> tuple[list[float], float, list[bool], float]:
    model = Counting(rank)
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["kept"])
    options: dict[str, Any] = {}
    if mode == "off at forward":
        options = {"forward_sync_buffers": False}
    elif mode == "off everywhere":
        options = {"broadcast_buffers": False}
    with pytest.warns(FutureWarning) if mode == "off everywhere" else _nothing():
        wrapped = phalanx.DistributedDataParallel(model, **options)
    if mode == "hook after":
        wrapped._register_buffer_comm_hook(None, _average, BufferHookLocation.POST_FORWARD)
    for step in range(3):
        if step == 1 and mode == "reassigned":
            model.level = torch.tensor([100.0 * (rank + 1)])
        wrapped(torch.ones(1, 2)).sum().backward()
    return model.seen, model.level.item(), model.flags.tolist(), model.kept.item()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _average(state: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
    works = []
    for name, buffer in buffers.items():
        if name == "level":
            buffer.div_(dist.get_world_size())
            works.append(dist.all_reduce(buffer, async_op=True).get_future())
    return works


EXPECTED = {
    "plain": ([[0, 10, 20], [0, 10, 20]], [30, 40]),
    "off at forward": ([[0, 10, 20], [0, 20, 40]], [30, 60]),
    "off everywhere": ([[0, 10, 20], [1, 21, 41]], [30, 61]),
    "reassigned": ([[0, 100, 110], [0, 100, 110]], [120, 130]),
    "hook after": ([[0, 15, 30], [0, 15, 30]], [45, 45]),
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_buffers_are_synchronised_where_asked_for(mode: str) -> None:
    seen, final = EXPECTED[mode]
    for rank, (levels, level, flags, kept) in enumerate(run_ranks(2, seen_levels, mode)):
        assert levels == seen[rank] and level == final[rank]
        assert kept == rank, "an ignored buffer is never touched"
        assert flags == ([True, True] if rank == 0 or mode != "off everywhere" else [False, True])


def other_layers(rank: int, world: int) -> list[float]:
    """A layer with a buffer is added after wrapping, to a model that had none, and another takes its place."""
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = phalanx.DistributedDataParallel(model)
    seen = []
    for _ in range(2):
        model.add_module("late", Counting(rank).requires_grad_(False))
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()
        seen += model.late.seen
    return seen


def test_buffers_of_layers_that_came_after_wrapping_are_synchronised() -> None:
    assert run_ranks(2, other_layers) == [[0, 10, 0, 10]] * 2


def two_forwards(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped = phalanx.DistributedDataParallel(model)
    torch.manual_seed(rank)
    for _ in range(2):
        wrapped.zero_grad()
        first, second = wrapped(torch.randn(8, 4)), wrapped(torch.randn(8, 4))
        (first.mean() + second.pow(2).mean()).backward()
    return [param.grad.clone() for param in model.parameters()]


def test_batchnorm_survives_two_forwards_before_one_backward() -> None:
    first, second = run_ranks(2, two_forwards)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def silent_forward(rank: int, world: int) -> None:
    model = Counting(rank)
    wrapped = phalanx.DistributedDataParallel(model)
    if rank == 0:  # alone: would hang or fail if forward under no_grad communicated
        with torch.no_grad():
            wrapped(torch.ones(1, 2))
    dist.barrier()


def test_forward_without_gradients_touches_no_communication() -> None:
    run_ranks(2, silent_forward)


def other_buffers(rank: int, world: int) -> str:
    net = nn.Sequential(nn.Linear(2, 2))
    names = ["first", "second"]
    for name in names if rank == 0 else names[::-1]:
        net.register_buffer(name, torch.full((3,), float(rank * 10 + names.index(name))))
    wrapped = phalanx.DistributedDataParallel(net)
    assert net.first.tolist() == [0.0] * 3 and net.second.tolist() == [1.0] * 3, "whatever the order of registration"
    if rank == 1:
        net.first = torch.zeros(4)  # as many bytes as before, where they are rounded up
    try:
        wrapped(torch.ones(1, 2))
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_buffer_that_one_rank_replaces_by_a_larger_one_is_an_error(backend: str) -> None:
    said = run_ranks(2, other_buffers, backend=backend)
    # Rank 0 has sent its own, and hears of it when it needs the other rank again.
    assert said[0] == "" and "this rank has 2 tensors of 28 bytes together, rank 0 has 2 of 24" in said[1], said


UNSUITABLE = {
    "sparse": torch.eye(2).to_sparse(),
    "rows": torch.eye(2).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "expanded": torch.ones(1).expand(3),
}


def with_unsuitable_buffer(rank: int, world: int, kind: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", UNSUITABLE[kind])
    with pytest.raises(PhalanxError, match="'odd' cannot be kept alike"):
        phalanx.DistributedDataParallel(model)
    phalanx.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["odd"])
    phalanx.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_a_buffer_that_nobody_can_overwrite_is_named_on_every_rank(kind: str) -> None:
    run_ranks(2, with_unsuitable_buffer, kind, timeout_s=30, pg_timeout_s=12)
