"""Contenders in processes of their own, which take turns: while one trains, the others sleep.

What a library sets for its whole process (the heap, threads) then counts for it and for nobody else, as it does
for its users. With names A and B, ranks 0 and 1 are A's, 2 and 3 are B's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from bench.measure import blocks

TEAM = 2
_PATIENCE = timedelta(minutes=10)


class Turns:
    """One process's view of the others. Every process makes one, and all call the same methods."""

    def __init__(self, rank: int, names: Sequence[str], backends: Sequence[str]) -> None:
        """`backends` are those of the contenders' own groups."""
        self._names = list(names)
        self.name = names[rank // TEAM]
        self.place = rank % TEAM
        teams = [list(range(TEAM * index, TEAM * (index + 1))) for index in range(len(names))]
        groups = [dist.new_group(team, backend=backend) for team, backend in zip(teams, backends, strict=True)]
        meeting = [dist.new_group(team, backend="gloo") for team in teams]
        self.group = groups[rank // TEAM]
        self._meeting = meeting[rank // TEAM]
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

    def agree(self, name: str, value: int) -> int:
        """What the first process of contender `name` has found."""
        if name == self.name and self.place == 0:
            self._store.set("agreed", str(value))
        self._store.wait(["agreed"], _PATIENCE)
        return int(self._store.get("agreed"))

    def interleave(self, step: Callable[[], object], num_rounds: int, steps_a_round: int) -> list[float]:
        """Milliseconds a step of this contender, one value a round."""
        found: list[float] = []

        def block() -> None:
            started = time.perf_counter()
            for _ in range(steps_a_round):
                step()
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
