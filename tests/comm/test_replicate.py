"""Overwriting tensors by those of one rank: what ranks have to have alike."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.hooks.group import collectives_from
from phalanx.comm.replicate import replicate
from phalanx.errors import MismatchError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
SHAPES = ((2, 3), (), (0, 4), (70_001,))


def overwrite(rank: int, world: int) -> None:
    collectives = collectives_from(None)
    for source in range(world):
        expected = [torch.full(shape, source + 1.0).to(dtype) for dtype in DTYPES for shape in SHAPES]
        mine = [torch.zeros_like(tensor) for tensor in expected] if rank != source else [t.clone() for t in expected]
        replicate(mine, collectives, source, "copying")
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_tensors_of_every_kind_become_those_of_the_source(backend: str) -> None:
    run_ranks(3, overwrite, backend=backend)


def differ(rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """What rank 1 is told, whose tensor has as many bytes as that of rank 0 and is another."""
    mine = torch.zeros(shape, dtype=dtype) if rank == 1 else torch.ones(2, 3)
    try:
        replicate([mine], collectives_from(None), 0, "copying")
    except MismatchError as error:
        assert not mine.any(), "nothing was overwritten"
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(("shape", "dtype"), [((3, 2), torch.float32), ((2, 3), torch.int32)], ids=["shape", "dtype"])
def test_tensors_of_as_many_bytes_are_not_overwritten_if_they_are_others(
    shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    said = run_ranks(2, differ, shape, dtype, backend=backend)
    assert "rank 0 has 1 of 24, or some of another shape or dtype" in said[1], said
