"""The files of state that one host's launcher holds, generation by generation.

In a run on one host these are the files of all ranks. On several, a host has those of its own ranks and of the ranks whose
mirror it keeps (`mirrors`); what the others have its workers find out from each other. Must not know what is in the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.launch.elastic.heads import Files, newest
from phalanx.launch.elastic.hosts.mirrors import held_on


@dataclass
class Kept:
    """What is kept of one generation."""

    number: int
    members: tuple[int, ...]
    """The numbers of its workers, by rank."""
    hosts: tuple[int, ...]
    """The host of each; empty in a run on one host."""
    files: dict[int, Files]
    """By rank."""
    beside: tuple[Files, ...] = ()
    """Those of which nothing is needed any more, but that somebody may be looking at."""

    @property
    def paths(self) -> list[list[str]]:
        """By rank; empty for one whose files are not here."""
        return [self.files[rank].paths if rank in self.files else [] for rank in range(len(self.members))]

    def version(self) -> int:
        """The newest version that all of its members have written, of a generation on one host."""
        return newest([one.head() for one in self.files.values()])

    def close(self) -> None:
        """Let go of the files."""
        for files in (*self.files.values(), *self.beside):
            files.close()


class Shelf:
    """One host's."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    @property
    def generations(self) -> list[Kept]:
        """The oldest first."""
        return self._kept

    def make(self, number: int, members: Sequence[int], hosts: Sequence[int] = (), host: int = 0) -> Kept:
        """New files for a generation, as host `host` needs them; the same ones if it is asked for again."""
        if not self._kept or self._kept[-1].number != number:
            here = held_on(host, hosts) if hosts else range(len(members))
            files = {rank: Files(f"state-{number}-{rank}") for rank in here}
            self._kept.append(Kept(number, tuple(members), tuple(hosts), files))
        return self._kept[-1]

    def told(self) -> dict[str, Any]:
        """What a worker of this host is told of the newest generation, and of those before it."""
        *before, last = self._kept
        if not last.hosts:
            return {"images": last.paths}  # from which to go on is known already
        names = ("generation", "members", "hosts", "images")
        kept = [dict(zip(names, (one.number, one.members, one.hosts, one.paths), strict=True)) for one in before]
        return {"images": last.paths, "kept": kept}

    def preserved(self, number: int, worker: int) -> None:
        """A member of generation `number`, the last that was left of it, has written all of the state to its files."""
        for place, one in enumerate(self._kept):
            if one.number == number and worker in one.members:
                rank = one.members.index(worker)
                beside = tuple(files for other, files in one.files.items() if other != rank)
                # As if it had been alone in that generation.
                self._kept[place] = Kept(number, (worker,), (), {0: one.files[rank]}, (*one.beside, *beside))

    def forget_before(self, number: int) -> None:
        """What is older than generation `number` is not needed any more."""
        while self._kept and self._kept[0].number < number:
            self._kept.pop(0).close()

    def close(self) -> None:
        """Let go of everything."""
        for one in self._kept:
            one.close()
        self._kept = []
