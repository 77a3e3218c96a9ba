"""Who gets what of an epoch: everything exactly once, in the steps that one process would take."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.deal import deal, even_part, num_shares

sizes = st.integers(0, 60)
worlds = st.integers(1, 7)


def test_the_drawings_in_the_docstring_are_right() -> None:
    ten = [[(share.start, share.stop) for share in deal(0, 10, 4, rank, 2)] for rank in range(2)]
    assert ten == [[(0, 2), (4, 6), (8, 9)], [(2, 4), (6, 8), (9, 10)]]
    nine = [[len(share) for share in deal(0, 9, 4, rank, 2)] for rank in range(2)]
    assert nine == [[2, 2, 1], [2, 2, 0]]
    for total, expected in ((11, [[2, 2, 3], [2, 2, 0]]), (9, [[2, 3], [2, 2]])):
        dealt = [[len(share) for share in deal(0, total, 4, rank, 2, least=2)] for rank in range(2)]
        assert dealt == expected


leasts = st.integers(1, 2)


@given(total=sizes, first=sizes, batch=st.integers(1, 20), world=worlds, drop=st.booleans(), least=leasts)
def test_every_unit_is_dealt_once_in_the_order_of_one_process(
    total: int, first: int, batch: int, world: int, drop: bool, least: int
) -> None:
    dealt = [list(deal(first, total, batch, rank, world, drop, least)) for rank in range(world)]
    alone = list(deal(first, total, batch, 0, 1, drop, least))
    assert {len(shares) for shares in dealt} == {len(alone)}
    for step, whole in enumerate(alone):
        parts = [shares[step] for shares in dealt]
        assert [unit for part in parts for unit in range(part.start, part.stop)] == list(range(whole.start, whole.stop))
        assert {part.end for part in parts} == {whole.end}
        assert parts[0].is_even == (len({len(part) for part in parts}) == 1)
        there = [len(part) for part in parts if len(part)]
        assert max(there) - min(there) <= 1 and (least > 1 or len(there) == min(world, len(whole)))
        assert min(there) >= min(least, batch, total - first)
    if not drop:
        assert sum(len(whole) for whole in alone) == max(0, total - first)


@given(total=sizes, batch=st.integers(1, 20), world=worlds, drop=st.booleans(), with_empty=st.booleans(), least=leasts)
def test_the_number_of_batches_is_known_before_they_are_dealt(
    total: int, batch: int, world: int, drop: bool, with_empty: bool, least: int
) -> None:
    least = min(least, batch)
    for rank in range(world):
        shares = [share for share in deal(0, total, batch, rank, world, drop, least) if with_empty or len(share)]
        assert num_shares(total, batch, rank, world, drop, with_empty, least) == len(shares)


@given(begin=sizes, more=sizes, world=worlds)
def test_parts_follow_each_other_without_a_gap(begin: int, more: int, world: int) -> None:
    parts = [even_part(begin, begin + more, rank, world) for rank in range(world)]
    assert parts[0][0] == begin and parts[-1][1] == begin + more
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
