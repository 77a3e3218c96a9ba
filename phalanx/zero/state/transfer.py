"""State on its way from one division of the parameters to another, in messages of bounded size.

Every rank knows both divisions, so it knows the whole schedule: which elements of which leaf are in which
rank's message of which round. Only the texts, which say what states look like, have to be exchanged first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...comm.collectives import Collectives
from ...plan import ParamSpec
from ...plan.shards import Move, Ownership, reslice
from .local_state import StateSlices
from .tree import Tree, leaves_of

# Elements of one rank's message: the memory of a transfer is (world + 1) messages, whatever the size of the state.
_MESSAGE_NUMEL = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements [start, stop) of a leaf on their way from one rank to another."""

    index: int
    path: str
    start: int
    stop: int
    source: int
    target: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def split(self, most: int) -> Iterator[Parcel]:
        for at in range(self.start, self.stop, most):
            yield Parcel(self.index, self.path, at, min(at + most, self.stop), self.source, self.target)


def exchange_texts(
    text: str, device: torch.device, collectives: Collectives, where: str
) -> list[str]:
    """Every rank's text, on every rank."""
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    sizes = torch.zeros(collectives.world, dtype=torch.int64, device=device)
    collectives.wait(collectives.all_gather(sizes, torch.tensor([mine.numel()], device=device)), where)
    longest = int(sizes.max().item())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = torch.empty(collectives.world * longest, dtype=torch.uint8, device=device)
    collectives.wait(collectives.all_gather(everyone, padded), where)
    rows = everyone.view(collectives.world, longest).cpu()
    return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes.tolist(), strict=True)]


def merge_trees(
    mine: Mapping[int, Tree], device: torch.device, collectives: Collectives
) -> dict[int, Tree]:
    """What every parameter's state looks like, on every rank. Ranks that hold parts of one agree about it."""
    text = json.dumps({str(index): tree for index, tree in mine.items()})
    merged: dict[int, Tree] = {}
    for said in exchange_texts(text, device, collectives, "exchanging what the state looks like"):
        for index, tree in json.loads(said).items():
            merged.setdefault(int(index), tree)
    return dict(sorted(merged.items()))


class Movement:
    """Moves the states that `trees` describe from the division `old` to the division `new` of `specs`."""

    def __init__(
        self,
        trees: Mapping[int, Tree],
        specs: Sequence[ParamSpec],
        old: Ownership,
        new: Ownership,
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        self._moves: dict[int, list[Move]] = {}
        for move in reslice(old, new):
            self._moves.setdefault(move.param, []).append(move)
        self._parcels: dict[tuple[torch.dtype, str], list[Parcel]] = {}
        for index, tree in trees.items():
            for leaf in leaves_of(tree):
                kind = self._parcels.setdefault((leaf.dtype, specs[index].device), [])
                if leaf.shape is None:
                    kind += [Parcel(index, leaf.path, m.start, m.stop, m.source, m.target) for m in self._moves[index]]
                else:
                    first, numel = self._moves[index][0], prod(leaf.shape)
                    kind.append(Parcel(index, leaf.path, 0, numel, first.source, first.target))

    def run(self, source: StateSlices, target: StateSlices, devices: Mapping[str, torch.device]) -> None:
        """Every rank calls it with what it holds and with memory for what it is to hold."""
        for (dtype, device), parcels in self._parcels.items():
            self._keep(parcels, source, target, dtype, devices[device])
            moving = [parcel for parcel in parcels if parcel.source != parcel.target]
            for load in _rounds(moving, self._collectives.world):
                self._round(load, source, target, dtype, devices[device])

    def _keep(
        self,
        parcels: Sequence[Parcel],
        source: StateSlices,
        target: StateSlices,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for parcel in parcels:
            if parcel.source == parcel.target == self._collectives.rank:
                for part in parcel.split(_MESSAGE_NUMEL):
                    values = torch.empty(part.numel, dtype=dtype, device=device)
                    source.read(part.index, part.path, part.start, part.stop, values)
                    target.write(part.index, part.path, part.start, part.stop, values)

    def _round(
        self,
        load: Sequence[Sequence[Parcel]],
        source: StateSlices,
        target: StateSlices,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        numel = max(sum(parcel.numel for parcel in parcels) for parcels in load)
        message = torch.zeros(numel, dtype=dtype, device=device)
        for at, parcel in _placed(load[self._collectives.rank]):
            source.read(parcel.index, parcel.path, parcel.start, parcel.stop, message[at : at + parcel.numel])
        everyone = torch.empty(self._collectives.world * numel, dtype=dtype, device=device)
        self._collectives.wait(self._collectives.all_gather(everyone, message), "moving optimizer state")
        for rank, parcels in enumerate(load):
            for at, parcel in _placed(parcels):
                if parcel.target == self._collectives.rank:
                    values = everyone[rank * numel + at : rank * numel + at + parcel.numel]
                    target.write(parcel.index, parcel.path, parcel.start, parcel.stop, values)


def _placed(parcels: Sequence[Parcel]) -> Iterator[tuple[int, Parcel]]:
    at = 0
    for parcel in parcels:
        yield at, parcel
        at += parcel.numel


def _rounds(parcels: Sequence[Parcel], world: int) -> Iterator[list[list[Parcel]]]:
    """What each rank sends in each round: as much as fits into a message, in the order of the parcels."""
    queues: list[deque[Parcel]] = [deque() for _ in range(world)]
    for parcel in parcels:
        queues[parcel.source].extend(parcel.split(_MESSAGE_NUMEL))
    while any(queues):
        load: list[list[Parcel]] = []
        for queue in queues:
            taken: list[Parcel] = []
            room = _MESSAGE_NUMEL
            while queue and queue[0].numel <= room:
                taken.append(queue.popleft())
                room -= taken[-1].numel
            load.append(taken)
        yield load
