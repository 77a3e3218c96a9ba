"""Arithmetic on sets of time intervals. Pure; the unit is the caller's.

A set is a list of (start, end) pairs, sorted, disjoint and not empty; `union` makes one of any pairs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

Interval = tuple[int, int]


def union(pairs: Iterable[Interval]) -> list[Interval]:
    """The set covered by any pairs; empty and backward ones cover nothing."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in pairs if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What two sets both cover."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What the first set covers and the second does not."""
    rest: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k, at = j, start
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                rest.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def length(intervals: Iterable[Interval]) -> int:
    """The time a set covers."""
    return sum(end - start for start, end in intervals)


def clip(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    """The part of a set between two moments. Looks at that part only: a long run is clipped pass by pass."""
    if end <= start:
        return []
    at = bisect_left(intervals, (start, start))
    if at and intervals[at - 1][1] > start:
        at -= 1
    part: list[Interval] = []
    while at < len(intervals) and intervals[at][0] < end:
        part.append((max(intervals[at][0], start), min(intervals[at][1], end)))
        at += 1
    return part


class Covered:
    """How much of a set lies between two moments, however many of its intervals do."""

    def __init__(self, intervals: list[Interval]) -> None:
        self._intervals = intervals
        self._before = [0, *accumulate(end - start for start, end in intervals)]

    def between(self, start: int, end: int) -> int:
        """The time that is covered there."""
        return self._until(end) - self._until(start) if end > start else 0

    def _until(self, moment: int) -> int:
        at = bisect_left(self._intervals, (moment,))
        # The last one may go on beyond the moment.
        return self._before[at] - (max(0, self._intervals[at - 1][1] - moment) if at else 0)


def rows(pairs: list[Interval]) -> list[int]:
    """For each pair the row it is drawn in, as few rows as possible, none overlapping in its row."""
    busy: list[tuple[int, int]] = []  # until when, and the row
    free: list[int] = []
    assigned = [0] * len(pairs)
    for index in sorted(range(len(pairs)), key=lambda index: pairs[index]):
        start, end = pairs[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)  # none is free: as many are busy as there are
        heapq.heappush(busy, (end, row))
        assigned[index] = row
    return assigned
