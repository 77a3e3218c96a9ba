"""Which crossings of a test's parameters `make test` runs, and which it leaves to `make test-thorough`.

Owns that choice and nothing else: all crossings stay in the code, under their names, and whoever names one runs it.

`@pytest.mark.covering(1)` is for a test whose parameters have little to do with each other: of its crossings `make test`
runs so many that every value of every parameter is there. `covering(2)` is for one in which two of them may meet: every
pair of values is there. The others are marked `thorough`. The fuzzer crosses most of what they cross.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

# What notices the mutants (tests/mutants) is always chosen: the list there would be untrue without it.
_CAUGHT = Path(__file__).parent / "mutants" / "caught.json"

Crossing = tuple[int, ...]
"""One value of each parameter, or a number that stands for it."""


def mark_thorough(items: Sequence[pytest.Item]) -> None:
    """After collection, before tests are selected by their marks: mark what only `make test-thorough` runs."""
    by_test: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        # A whole file may have the mark, and some of its tests no parameters. What is left out anyway covers nothing.
        if not hasattr(item, "callspec") or any(map(item.get_closest_marker, ("thorough", "soak"))):
            continue
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    wanted = _caught() if by_test else frozenset()
    for crossed in by_test.values():
        marker = crossed[0].get_closest_marker("covering")
        assert marker is not None, "only marked tests are in the table"
        # By identity: every crossing holds the objects of the same lists, of which some cannot be hashed.
        crossings = [tuple(map(id, item.callspec.params.values())) for item in crossed]
        first = [place for place, item in enumerate(crossed) if item.nodeid in wanted]
        chosen = cover(crossings, *marker.args, first)
        for place, item in enumerate(crossed):
            if place not in chosen:
                item.add_marker(pytest.mark.thorough)


def cover(crossings: Sequence[Crossing], strength: int, first: Collection[int] = ()) -> frozenset[int]:
    """Places of crossings that hold, beside those at `first`, all that is in any: each value, or each `strength` of them.

    Alike in every process. Of two ways to choose that which needs fewer, and of two as good that which takes turns.
    """
    return min((_cover(crossings, strength, first, by_turns) for by_turns in (True, False)), key=len)


def _cover(crossings: Sequence[Crossing], strength: int, first: Collection[int], by_turns: bool) -> frozenset[int]:
    """Step by step the crossing that brings most; of several the one whose values were used least, or just the first."""
    strength = min(strength, len(crossings[0]))
    meetings = [set(itertools.combinations(enumerate(crossing), strength)) for crossing in crossings]
    missing = set[tuple[tuple[int, int], ...]]().union(*meetings)
    uses: Counter[tuple[int, int]] = Counter()
    waiting, chosen = sorted(first), set[int]()

    def worth(place: int) -> tuple[int, int, int]:
        used = sum(uses[value] for value in enumerate(crossings[place])) if by_turns else 0
        return len(missing & meetings[place]), -used, -place

    while waiting or missing:
        place = waiting.pop() if waiting else max(range(len(crossings)), key=worth)
        chosen.add(place)
        missing -= meetings[place]
        uses.update(enumerate(crossings[place]))
    return frozenset(chosen)


def _caught() -> frozenset[str]:
    return frozenset(itertools.chain.from_iterable(json.loads(_CAUGHT.read_text()).values()))
