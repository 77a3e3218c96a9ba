"""Collectives over several hosts: what stays in range, and what ranks of different hosts have to agree on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.group.direct import collectives_of
from phalanx.errors import MismatchError, PeerFailure
from tests.cluster import run_ranks
from tests.comm.contract import group_over

pytestmark = pytest.mark.timeout(60)


def means_of_large_numbers(rank: int, world: int, layout: str, numel: int) -> None:
    """What one rank has fits float16, and so does the mean; the sum does not, not even that of one host."""
    with group_over(layout, rank, "phalanx"):
        expected = torch.full((numel,), 40_000.0, dtype=torch.float16)
        tensor = expected.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert torch.equal(tensor, expected), tensor[:3]
        for root in range(world):
            tensor = expected.clone()
            dist.reduce(tensor, root, dist.ReduceOp.AVG)
            assert torch.equal(tensor, expected), "the root's is the mean, and the others' stay as they are"
        whole, part = expected.repeat(world), torch.empty_like(expected)
        dist.reduce_scatter_single(part, whole, dist.ReduceOp.AVG)
        assert torch.equal(part, expected) and torch.equal(whole, expected.repeat(world))
        direct = collectives_of(dist.group.WORLD)
        assert direct is not None
        tensor = expected.clone()
        direct.wait(direct.all_reduce(tensor, scale=1.0 / world), "a mean")
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("numel", [10, 200_003], ids=["inline", "large"])
@pytest.mark.parametrize("layout", ["aabb", "aab", "ab"])
def test_means_of_float16_over_hosts_stay_in_range(layout: str, numel: int) -> None:
    run_ranks(len(layout), means_of_large_numbers, layout, numel, backend=None)


def call_otherwise(rank: int, world: int, layout: str) -> list[str]:
    """Calls that differ between the ranks of two hosts, each followed by some that do not."""
    other = layout[rank] == "b"
    max_, sum_ = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    differing = (
        lambda: dist.all_reduce(torch.ones(8), max_ if other else sum_),
        lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32 if other else torch.float32)),
        lambda: dist.all_reduce(torch.ones(8_000_000 if other else 8)),
        lambda: dist.broadcast(torch.ones(8), world - 1 if other else 0),
        lambda: dist.barrier() if other else dist.all_reduce(torch.ones(3)),
        lambda: dist.all_gather_single(torch.ones(8 * world), torch.ones(8))
        if other
        else dist.reduce_scatter_single(torch.ones(8), torch.ones(8 * world)),
    )
    said = []
    with group_over(layout, rank, "phalanx", timeout_s=20.0):
        for call in differing:
            with pytest.raises(MismatchError) as raised:
                call()
            said.append(str(raised.value))
            for _ in range(2):
                tensor = torch.full((5,), float(rank))
                dist.all_reduce(tensor)
                assert tensor.tolist() == [world * (world - 1) / 2] * 5, "the group is as usable as before"
    return said


@pytest.mark.parametrize("layout", ["ab", "aab"])
def test_ranks_of_different_hosts_that_call_different_collectives_are_told(layout: str) -> None:
    last = len(layout) - 1
    for rank, said in enumerate(run_ranks(len(layout), call_otherwise, layout, backend=None)):
        assert all(text.startswith(f"rank {rank}: the ranks call different collectives: rank 0: ") for text in said)
        assert "rank 0: all_reduce of 8 x float32 by sum" in said[0] and "8 x float32 by max" in said[0]
        assert f"rank {last}: all_reduce of 8 x int32" in said[1]
        assert f"rank {last}: barrier" in said[4]


def compare_seldom(rank: int, world: int) -> int:
    """How often the ranks compare in fifty rounds of the same three collectives."""
    with group_over("ab", rank, "phalanx"):
        direct = collectives_of(dist.group.WORLD)
        assert direct is not None
        operations = direct._lane.operations  # type: ignore[attr-defined]
        gathered = []
        before = operations._all_gather
        operations._all_gather = lambda call: (gathered.append(call), before(call))[1]
        for _ in range(50):
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(9))
            dist.barrier()
        del operations._all_gather
        return len(gathered)


def test_collectives_that_repeat_themselves_are_compared_once() -> None:
    # Each of the three when it first comes, and the first once more, after the last.
    assert run_ranks(2, compare_seldom, backend=None) == [4, 4]


def come_to_another(rank: int, world: int, layout: str, is_known: bool) -> str:
    """The ranks of host b leave out one collective of a round that all know; what they do next is known as well, or new."""
    max_, sum_ = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    with pytest.raises(PeerFailure) as raised, group_over(layout, rank, "phalanx", timeout_s=50.0):
        for _ in range(2):
            for op in (sum_, sum_, max_):
                dist.all_reduce(torch.ones(3), op)
        dist.all_reduce(torch.ones(3), sum_)
        if layout[rank] == "a":
            dist.all_reduce(torch.ones(3), sum_)
        elif is_known:
            dist.all_reduce(torch.ones(3), max_)
        else:
            dist.broadcast(torch.ones(5), 0)
        dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("layout", ["ab", "aab"])
def test_hosts_that_come_to_different_collectives_that_each_knows_are_told(layout: str, is_known: bool) -> None:
    there = "all_reduce of 3 x float32 by max" if is_known else "broadcast of 20 x uint8 with root 0"
    # In the first case each pair has been seen: the sum after a sum, and the maximum after a sum.
    for said in run_ranks(len(layout), come_to_another, layout, is_known, backend=None):
        assert "the ranks call different collectives: " in said
        assert "rank 0: all_reduce of 3 x float32 by sum" in said and f"rank {len(layout) - 1}: {there}" in said, said
