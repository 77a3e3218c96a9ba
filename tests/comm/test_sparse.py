"""Sparse sums against a reference made here, over transports, shapes, dtypes and sizes that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.collectives import Work
from phalanx.comm.sparse import SparseSum
from phalanx.comm.torch_backend import collectives_for
from phalanx.errors import ReductionError
from tests.cluster import run_ranks

# Rows a rank by round: within the first parcel, none, far beyond it, and back to a few.
ROUNDS = ([3, 0, 40, 7], [0, 0, 0, 0], [1, 2500, 0, 30], [900, 5, 900, 900], [1, 1, 1, 1])


def _wait(work: Work) -> None:
    work.wait()


def _made(rank: int, number: int, rows: int, shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    indices = torch.stack([torch.randint(size, (rows,), generator=generator) for size in shape[:dims]])
    # Small whole numbers: sums are exact in every dtype, whatever their order.
    values = torch.randint(-3, 4, (rows, *shape[dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape).coalesce()


def _sum_rounds(rank: int, world: int, shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> list[int]:
    collectives = collectives_for(dist.group.WORLD)
    summing = SparseSum(collectives, shape, dtype, torch.device("cpu"), num_facts=5)
    sizes = []
    for number, rows in enumerate(ROUNDS):
        parts = [_made(other, number, rows[other], shape, dims, dtype) for other in range(world)]
        facts = torch.arange(5.0) * (rank + number)
        before = parts[rank].clone()
        total = summing.finish(summing.start(parts[rank], facts), _wait, facts)
        assert total.is_coalesced() and total.dtype == dtype and total.shape == shape
        expected = sum(part.to_dense() for part in parts)
        assert torch.equal(total.to_dense(), expected)
        assert total.sparse_dim() == (dims if any(rows[:world]) else 1)
        assert torch.equal(facts, torch.arange(5.0) * sum(other + number for other in range(world)))
        assert torch.equal(parts[rank].to_dense(), before.to_dense()), "what was sent is not changed"
        sizes.append(summing._words)
    return sizes


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_of_rows_that_come_and_go(world: int, backend: str) -> None:
    sizes = run_ranks(world, _sum_rounds, (3000, 5), 1, torch.float32, backend=backend)
    assert all(other == sizes[0] for other in sizes), "ranks agree on the size of the next parcel"
    first, _, grown, _, last = sizes[0]
    if world > 1:
        assert grown > first, "it grows with what is needed"
        assert last < grown, "and shrinks again"


@pytest.mark.parametrize(
    ("shape", "dims", "dtype"),
    [
        ((50, 3), 1, torch.bfloat16),
        ((50, 3), 1, torch.float16),
        ((50, 7), 1, torch.float64),
        ((50, 3), 1, torch.complex64),
        ((50, 3), 2, torch.float32),
        ((50,), 1, torch.float32),
        ((9, 8, 7), 2, torch.float32),
        ((4, 3, 2, 2), 1, torch.int64),
        ((50, 0), 1, torch.float32),
    ],
    ids=str,
)
def test_every_kind_of_tensor(shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    run_ranks(3, _sum_rounds, shape, dims, dtype, backend="phalanx")


def _differ(rank: int, world: int) -> str:
    summing = SparseSum(collectives_for(dist.group.WORLD), (4, 4), torch.float32, torch.device("cpu"), 0)
    part = torch.eye(4).to_sparse(1 + rank % 2)
    with pytest.raises(ReductionError) as caught:
        summing.finish(summing.start(part, torch.empty(0)), _wait, torch.empty(0))
    return str(caught.value)


def test_ranks_that_differ_in_layout_are_told_on_every_rank() -> None:
    said: list[Any] = run_ranks(3, _differ)
    assert all("[1, 2, 1]" in text and f"rank {rank}" in text for rank, text in enumerate(said))
