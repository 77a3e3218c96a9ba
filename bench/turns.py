"""Contenders in processes of their own, which take turns: while one trains, the others sleep.

What a library sets for its whole process (the heap, threads) then counts for it and for nobody else, as it does
for its users. With teams of two and names A and B, ranks 0 and 1 are A's, 2 and 3 are B's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bench.measure import Samples, blocks

_PATIENCE = timedelta(minutes=10)
# Not timed: caches and page tables are cold after a sleep. A step that takes 32 ms takes 41 and 36 then.
_WAKING_STEPS = 2


class Turns:
    """One process's view of the others. Every process makes one, and all call the same methods."""

    def __init__(self, rank: int, size: int, names: Sequence[str], backends: Sequence[str]) -> None:
        """A team of `size` ranks for each name; `backends` are those of the teams' own groups."""
        self._names = list(names)
        self.name = names[rank // size]
        self.place = rank % size
        teams = [list(range(size * index, size * (index + 1))) for index in range(len(names))]
        groups = [dist.new_group(team, backend=backend) for team, backend in zip(teams, backends, strict=True)]
        meeting = [dist.new_group(team, backend="gloo") for team in teams]
        self.group = groups[rank // size]
        self._meeting = meeting[rank // size]
        self._store = dist.PrefixStore("turns", dist.distributed_c10d._get_default_store())
        self._turn = 0

    def take(self, order: Sequence[str], act: Callable[[], None]) -> None:
        """Each contender in `order` acts once, alone on the machine; return when the last one has."""
        for name in order:
            if name == self.name:
                self._await(self._turn)
                dist.barrier(self._meeting)
                act()
                dist.barrier(self._meeting)
                if self.place == 0:
                    self._store.set(str(self._turn), "")
            self._turn += 1
        self._await(self._turn)

    def steps_in_a_block(
        self, name: str, step: Callable[[], object], block_s: float, settle: Callable[[], object] | None = None
    ) -> int:
        """How many steps of contender `name` fill a block; the same number for everybody. `settle` ends what steps began."""

        def measure() -> None:
            started = time.perf_counter()
            for _ in range(2):
                step()
            if settle is not None:
                settle()
            if self.place == 0:
                num_steps = max(1, round(2 * block_s / (time.perf_counter() - started)))
                self._store.set("steps", str(num_steps))

        self.take([name], measure)
        return int(self._store.get("steps"))

    def interleave(
        self, step: Callable[[], object], num_rounds: int, steps_a_round: int, settle: Callable[[], object] | None = None
    ) -> list[float]:
        """Milliseconds a step of this contender, one value a round. `settle` waits for a device before time is taken."""
        found: list[float] = []

        def block() -> None:
            for _ in range(_WAKING_STEPS):
                step()
            if settle is not None:
                settle()
            started = time.perf_counter()
            for _ in range(steps_a_round):
                step()
            if settle is not None:
                settle()
            found.append(1e3 * (time.perf_counter() - started) / steps_a_round)

        gc.collect()
        gc.disable()
        try:
            self.take(list(blocks(self._names, num_rounds)), block)
        finally:
            gc.enable()
        return found[1:]  # the first round warms up

    def _await(self, turn: int) -> None:
        """Sleep until the turn before this one has ended."""
        if turn > 0:
            self._store.wait([str(turn - 1)], _PATIENCE)


def team_samples(by_rank: Sequence[Mapping[str, Any]], name: str) -> Samples:
    """What the ranks of one team found, each a "name" and "ms": a step has ended when its slowest rank has."""
    found = [rank["ms"] for rank in by_rank if rank["name"] == name]
    return Samples(tuple(map(max, zip(*found, strict=True))))
