"""State on its way from one partition of the parameters to another, in messages of bounded size.

Every rank knows both partitions, so it knows the whole schedule: which elements of which leaf are in which
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
from .local_state import LocalState
from .tree import Tree, leaves_of

# Elements of one rank's message: the memory of a transfer is (world + 1) messages, whatever the size of the state.
_MESSAGE_NUMEL = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LeafMove:
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

    def split(self, most: int) -> Iterator[LeafMove]:
        for at in range(self.start, self.stop, most):
            yield LeafMove(self.index, self.path, at, min(at + most, self.stop), self.source, self.target)


def exchange_texts(text: str, device: torch.device, collectives: Collectives, where: str) -> list[str]:
    """Every rank's text, on every rank."""
    # Never empty: torch makes no tensor from no bytes.
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    # Sizes first, because a gather takes as much from every rank: shorter texts are padded to the longest.
    sizes = torch.zeros(collectives.world, dtype=torch.int64, device=device)
    collectives.wait(collectives.all_gather(sizes, torch.tensor([mine.numel()], device=device)), where)
    longest = int(sizes.max().item())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = torch.empty(collectives.world * longest, dtype=torch.uint8, device=device)
    collectives.wait(collectives.all_gather(everyone, padded), where)
    rows = everyone.view(collectives.world, longest).cpu()
    return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes.tolist(), strict=True)]


def merge_trees(mine: Mapping[int, Tree], device: torch.device, collectives: Collectives) -> dict[int, Tree]:
    """What every parameter's state looks like, on every rank. Ranks that hold parts of one agree about it."""
    text = json.dumps({str(index): tree for index, tree in mine.items()})
    merged: dict[int, Tree] = {}
    for said in exchange_texts(text, device, collectives, "exchanging what the state looks like"):
        for index, tree in json.loads(said).items():
            # Keys of JSON are texts. Several owners of one parameter say the same about it; the first is heard.
            merged.setdefault(int(index), tree)
    return dict(sorted(merged.items()))


class StateTransfer:
    """Moves the states that `trees` describe from the owners `old` to the owners `new` of `specs`."""

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
        # By dtype and device, because a message has one of each. In the same order on every rank: it says what is where.
        self._leaf_moves: dict[tuple[torch.dtype, str], list[LeafMove]] = {}
        for index, tree in trees.items():
            for leaf in leaves_of(tree):
                alike = self._leaf_moves.setdefault((leaf.dtype, specs[index].device), [])
                if leaf.shape is None:
                    alike += [LeafMove(index, leaf.path, m.start, m.stop, m.source, m.target) for m in self._moves[index]]
                else:
                    # It cannot be cut, so it goes whole, from the first owner to the new first owner.
                    first, numel = self._moves[index][0], prod(leaf.shape)
                    alike.append(LeafMove(index, leaf.path, 0, numel, first.source, first.target))

    def run(self, source: LocalState, target: LocalState, devices: Mapping[str, torch.device]) -> None:
        """Every rank calls it with what it holds and with memory for what it is to hold."""
        for (dtype, device), moves in self._leaf_moves.items():
            self._keep(moves, source, target, dtype, devices[device])
            moving = [move for move in moves if move.source != move.target]
            for sends in _rounds(moving, self._collectives.world):
                self._round(sends, source, target, dtype, devices[device])

    def _keep(
        self,
        moves: Sequence[LeafMove],
        source: LocalState,
        target: LocalState,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for move in moves:
            if move.source == move.target == self._collectives.rank:
                # Through memory of bounded size, like what is sent: a leaf may be cut otherwise on the two sides.
                for part in move.split(_MESSAGE_NUMEL):
                    values = torch.empty(part.numel, dtype=dtype, device=device)
                    source.read(part.index, part.path, part.start, part.stop, values)
                    target.write(part.index, part.path, part.start, part.stop, values)

    def _round(
        self,
        sends: Sequence[Sequence[LeafMove]],
        source: LocalState,
        target: LocalState,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        numel = max(sum(move.numel for move in moves) for moves in sends)
        # A gather in place of sends: every backend has it, and a rank with nothing to send takes part with zeros.
        message = torch.zeros(numel, dtype=dtype, device=device)
        for at, move in _placed(sends[self._collectives.rank]):
            source.read(move.index, move.path, move.start, move.stop, message[at : at + move.numel])
        everyone = torch.empty(self._collectives.world * numel, dtype=dtype, device=device)
        self._collectives.wait(self._collectives.all_gather(everyone, message), "moving optimizer state")
        for rank, moves in enumerate(sends):
            for at, move in _placed(moves):
                if move.target == self._collectives.rank:
                    values = everyone[rank * numel + at : rank * numel + at + move.numel]
                    target.write(move.index, move.path, move.start, move.stop, values)


def _placed(moves: Sequence[LeafMove]) -> Iterator[tuple[int, LeafMove]]:
    at = 0
    for move in moves:
        yield at, move
        at += move.numel


def _rounds(moves: Sequence[LeafMove], world: int) -> Iterator[list[list[LeafMove]]]:
    """What each rank sends in each round: as much as fits into a message, in the order of the moves."""
    # One queue per sender, emptied in step: all messages of a round have the length of the longest.
    queues: list[deque[LeafMove]] = [deque() for _ in range(world)]
    for move in moves:
        queues[move.source].extend(move.split(_MESSAGE_NUMEL))
    while any(queues):
        sends: list[list[LeafMove]] = []
        for queue in queues:
            taken: list[LeafMove] = []
            room = _MESSAGE_NUMEL
            while queue and queue[0].numel <= room:
                taken.append(queue.popleft())
                room -= taken[-1].numel
            sends.append(taken)
        yield sends
