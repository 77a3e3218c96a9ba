"""Who keeps a second copy of whose state, so that a host may be lost with all that it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def keepers(hosts: Sequence[int]) -> tuple[int | None, ...]:
    """By rank, the rank that keeps its mirror: one of the next host, in the order of hosts' numbers. None if there is no
    other host. `hosts` is the host of each rank.

    >>> keepers([0, 0, 1, 1])
    (2, 3, 0, 1)
    >>> keepers([0, 1, 1, 2])
    (1, 3, 3, 0)
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    order = sorted(ranks)
    if len(order) < 2:
        return (None,) * len(hosts)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    found: list[int | None] = []
    for rank, host in enumerate(hosts):
        there = ranks[following[host]]
        # Spread over the ranks there: each sends and receives about as much as any other.
        found.append(there[ranks[host].index(rank) % len(there)])
    return tuple(found)


def held_on(host: int, hosts: Sequence[int]) -> list[int]:
    """The ranks whose state is kept on `host`: its own, and those whose mirror is there."""
    found = keepers(hosts)
    return [rank for rank in range(len(hosts)) if hosts[rank] == host or _host(hosts, found[rank]) == host]


def _host(hosts: Sequence[int], rank: int | None) -> int | None:
    return None if rank is None else hosts[rank]
