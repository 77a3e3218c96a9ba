"""From which state a generation on several hosts goes on: decided from what each of its ranks sees on its own host. Pure.

A host keeps files of its own ranks and mirrors of others'. A version of a generation can be had if of every rank of it some
host that is left has it, whole. The newest generation of which there is such a version is the one to go on from: what came
after it never got so far that anybody relied on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Seen = Mapping[int, Mapping[int, frozenset[int]]]
"""What one rank sees on its host: by generation and rank of that, the versions that are there."""


@dataclass(frozen=True, slots=True)
class Move:
    """A file of an old rank goes from one rank of now to another, which keeps it for its whole host."""

    what: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Go on from `version` of `generation`; `moves` complete its files on every host."""

    generation: int
    version: int
    moves: tuple[Move, ...]


def choose(seen: Sequence[Seen], worlds: Mapping[int, int], hosts: Sequence[int]) -> Choice | None:
    """`seen` and `hosts` by rank, `worlds` the number of ranks of each generation. None if nothing can be had whole."""
    for generation in sorted(worlds, reverse=True):
        there = [_versions(seen, generation, rank) for rank in range(worlds[generation])]
        common = frozenset.intersection(*there)
        if common:
            version = max(common)
            return Choice(generation, version, tuple(_moves(seen, generation, version, worlds[generation], hosts)))
    return None


def _versions(seen: Sequence[Seen], generation: int, rank: int) -> frozenset[int]:
    return frozenset().union(*(one.get(generation, {}).get(rank, frozenset()) for one in seen))


def _moves(seen: Sequence[Seen], generation: int, version: int, world: int, hosts: Sequence[int]) -> list[Move]:
    found = []
    for old in range(world):
        having = [rank for rank, one in enumerate(seen) if version in one.get(generation, {}).get(old, ())]
        found += moves_to_all(old, having, hosts)
    return found


def moves_to_all(what: int, having: Sequence[int], hosts: Sequence[int]) -> list[Move]:
    """From the first rank that has it to the first rank of each host that has not."""
    without = dict.fromkeys(host for host in hosts if host not in {hosts[rank] for rank in having})
    return [Move(what, having[0], hosts.index(host)) for host in without]
