"""What training held on each rank, by kind, and what it would have held without sharding. Pure."""

from __future__ import annotations

from phalanx.observe import trace
from phalanx.observe.run import Run

UNSHARDED = "unsharded_state"
"""What the optimizer would hold on every rank."""


def memory_rows(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Bytes by kind of each rank that recorded them.

    Where ranks hold shards of one state and do not say how large it is, it is the sum of the shards.
    """
    found = []
    for rank in run.ranks:
        fact = rank.facts.get(trace.MEMORY)
        if isinstance(fact, dict):
            numbers = {k: float(v) for k, v in fact.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            found.append((rank.rank, bool(fact.get("sharded")), numbers))
    whole = sum(numbers.get("state", 0.0) for _, _, numbers in found)
    for _, sharded, numbers in found:
        if sharded and len(found) == len(run.ranks) > 1:
            numbers.setdefault(UNSHARDED, whole)
    return [(rank, numbers) for rank, _, numbers in found]
