"""Interval sets against plain sets of moments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.intervals import Covered, Interval, clip, difference, intersection, length, rows, union

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(pairs)
def test_union_covers_the_same_moments_in_sorted_disjoint_pieces(given: list[Interval]) -> None:
    merged = union(given)
    assert moments(merged) == moments(given)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(merged))
    assert length(merged) == len(moments(given))


@given(pairs, pairs)
def test_intersection_and_difference_are_those_of_sets(first: list[Interval], second: list[Interval]) -> None:
    a, b = union(first), union(second)
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)


@given(pairs, st.integers(0, 40), st.integers(0, 40))
def test_clip_keeps_what_lies_between(given: list[Interval], start: int, end: int) -> None:
    found = clip(union(given), start, end)
    assert moments(found) == moments(given) & set(range(start, end))
    assert all(first < last for first, last in found)


def test_clipping_a_long_run_pass_by_pass_does_not_look_at_all_of_it_each_time() -> None:
    class Counted(list[Interval]):
        looks = 0

        def __getitem__(self, index: object) -> Interval:  # type: ignore[override]
            self.looks += 1
            return super().__getitem__(index)  # type: ignore[index, no-any-return]

    whole = Counted((at, at + 1) for at in range(0, 20_000, 2))
    assert [clip(whole, at, at + 2) for at in range(0, 20_000, 2)] == [[one] for one in whole]
    assert whole.looks < 100 * len(whole)


@given(pairs)
def test_rows_never_overlap_and_are_as_few_as_the_deepest_moment(given: list[Interval]) -> None:
    spans = [(start, end) for start, end in given if end > start]
    assigned = rows(spans)
    for row in set(assigned):
        mine = [span for span, at in zip(spans, assigned, strict=True) if at == row]
        assert length(mine) == len(moments(mine))
    deepest = max((sum(start <= at < end for start, end in spans) for at in range(41)), default=0)
    assert len(set(assigned)) == deepest


@given(pairs, st.integers(0, 40), st.integers(0, 40))
def test_how_much_is_covered_is_known_without_cutting_it_out(given: list[Interval], start: int, end: int) -> None:
    assert Covered(union(given)).between(start, end) == length(clip(union(given), start, end))


@pytest.mark.timeout(20)
def test_many_that_overlap_find_their_rows_at_once() -> None:
    assert rows([(at, 1 << 40) for at in range(40_000)]) == [*range(40_000)]
