"""One copy for all ranks of a host: the same memory, or an error on every rank."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from phalanx.comm.hooks.group import collectives_from
from phalanx.comm.memory import one_copy
from phalanx.comm.memory.one_copy import allocate_one_copy
from phalanx.errors import CommunicationError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


def write_and_read(rank: int, world: int, dtype: torch.dtype, numel: int) -> None:
    collectives = collectives_from(None)
    tensor = allocate_one_copy(numel, dtype, collectives)
    assert tensor.shape == (numel,) and tensor.dtype is dtype and not tensor.any()
    collectives.barrier("reading zeros")
    if rank == world - 1:
        tensor.fill_(1)
    collectives.barrier("writing")
    assert bool(tensor.all()), "what one rank writes all read"


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.bool, 70_001), (torch.complex64, 300_000)], ids=str
)
def test_all_ranks_have_the_same_memory(dtype: torch.dtype, numel: int) -> None:
    run_ranks(3, write_and_read, dtype, numel, backend="phalanx")


def fail_on_one(rank: int, world: int, where: str, victim: int) -> str:
    collectives = collectives_from(None)
    if rank != victim:
        with pytest.raises(CommunicationError) as raised:
            allocate_one_copy(10, torch.float32, collectives)
        assert raised.value.ranks == (victim,)
    else:
        error = CommunicationError("injected")
        with mock.patch.object(one_copy, where, side_effect=error), pytest.raises(CommunicationError) as raised:
            allocate_one_copy(10, torch.float32, collectives)
    collectives.barrier("the group is as usable as before")
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(("where", "victim"), [("_make", 0), ("_opened", 1)])
def test_a_rank_that_gets_no_memory_is_named_on_the_others_which_do_not_wait(where: str, victim: int, backend: str) -> None:
    said = run_ranks(3, fail_on_one, where, victim, backend=backend)
    assert said[victim] == "injected"
    assert f"rank 2: rank {victim} got no memory to share" in said[2], said
