"""Peak memory of contenders, each in fresh processes, several times: where the heap comes to lie is a matter of chance."""

from __future__ import annotations

import statistics
from typing import Any

from bench import ranks
from bench.measure import Samples, ratio
from bench.table import Row

_TIMES = 3


def weigh(size: int, function: str, arguments: dict[str, Any]) -> Samples:
    """What `function` returns, in bytes, on average over `size` ranks: one value a time."""
    return Samples(tuple(statistics.mean(ranks.run(size, function, arguments)) for _ in range(_TIMES)))


def memory_row(title: str, ours: Samples, theirs: Samples) -> Row:
    """The medians beside each other."""
    pairs = ratio(ours, theirs)
    share = ours.median / theirs.median
    return Row(title, ours.median / 1e6, theirs.median / 1e6, share, pairs.low, pairs.high, unit="MB", target=1.0)
