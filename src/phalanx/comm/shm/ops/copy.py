"""Collectives that only move: broadcast, all_gather, gather, scatter, all_to_all, barrier.

Small data goes inline with the opening step, larger data is read where it lies if that is
shared memory, and shown on the staging buffers block by block if not (see `reduce`). Tensors are flat and
contiguous, and are moved as bytes whatever their type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from ....errors import MismatchError
from ...memory.extent import ALIGNMENT
from ..transport.call import Call, ReduceOp, Verb, as_bytes, layout_of, signature
from ..transport.staging import BLOCK_BYTES, StagingBuffer
from ..transport.team import INLINE_BYTES, NOWHERE, Places, Team

_WORD = torch.int64
_MANY_BYTES = 1 << 20

_Fill = Callable[[int, torch.Tensor], None]
_Drain = Callable[[int, list[torch.Tensor]], None]


class CopyOperations:
    """The moving collectives of one team."""

    def __init__(self, team: Team, staging: StagingBuffer) -> None:
        self._team = team
        self._staging = staging
        self._size = team.size
        self._index = team.index

    def barrier(self, call: Call) -> None:
        """Return when all ranks have called this."""
        self._team.open(signature(Verb.BARRIER), call.timeout)

    def broadcast(self, call: Call) -> None:
        """Replace the output by that of rank `root` of the team."""
        data, root = as_bytes(call.outputs[0]), call.root
        what = signature(Verb.BROADCAST, torch.uint8, data.numel(), ReduceOp.SUM, root)
        is_root = root == self._index
        if what.numel <= INLINE_BYTES:
            # Only the root's inline area is used; the opening step publishes what it wrote there.
            area = self._team.inline(what.numel, torch.uint8)[root]
            if is_root:
                area.copy_(data)
            self._team.open(what, call.timeout)
            if not is_root:
                _copy(data, area)
            return
        # Where the others' tensors lie does not matter: each copies into its own.
        place = self._team.memory.locate(data) if is_root else None
        own = Places(NOWHERE if place is None else place, self._staging.offset)

        def fill(block: int, half: torch.Tensor) -> None:
            if is_root:
                _put(half, data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

        def drain(block: int, halves: list[torch.Tensor]) -> None:
            if not is_root:
                _get(halves[root], data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

        if place is None:
            fill(0, self._staging.own(torch.uint8))
        self._team.open(what, call.timeout, own)
        places = self._team.places(own)
        if places[root].memory != NOWHERE:
            if not is_root:
                _copy(data, self._team.view(root, places[root].memory, what.numel, torch.uint8))
            # The root's tensor is read until all have taken this step; its owner must not change it before.
            self._team.step()
        else:
            self._relay(-(-what.numel // BLOCK_BYTES), places, fill, drain)

    def all_gather(self, call: Call) -> None:
        """Fill output r with rank r's input, on every rank or, for GATHER, only on `root`.

        Output `index` may be the input. A rank that is to receive nothing has no outputs.
        """
        data = as_bytes(call.inputs[0])
        received = [as_bytes(output) for output in call.outputs]
        sizes = call.sizes or tuple(target.numel() for target in received)
        what = signature(call.verb, torch.uint8, sum(sizes), ReduceOp.SUM, call.root, 1.0, layout_of(sizes))
        largest = max(sizes)
        if largest <= INLINE_BYTES:
            areas = self._team.inline(largest, torch.uint8)
            _put(areas[self._index], data)
            self._team.open(what, call.timeout)
            self._receive(received, areas, data)
            return
        place = self._team.memory.locate(data) if data.numel() else None
        own = Places(NOWHERE if place is None else place, self._staging.offset)

        def fill(block: int, half: torch.Tensor) -> None:
            _put(half, data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

        def drain(block: int, halves: list[torch.Tensor]) -> None:
            for index, target in enumerate(received):
                if index != self._index:
                    _get(halves[index], target[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

        if place is None:
            fill(0, self._staging.own(torch.uint8))
        self._team.open(what, call.timeout, own)
        places = self._team.places(own)
        if all(p.memory != NOWHERE for p in places):
            views = [self._team.view(i, p.memory, sizes[i], torch.uint8) for i, p in enumerate(places)]
            self._receive(received, views, data)
            self._team.step()  # peers read this rank's input until then
            return
        self._join_staging(places, own, fill)
        self._relay(-(-largest // BLOCK_BYTES), places, fill, drain)
        if received:
            _keep(data, received[self._index])

    def all_to_all(self, call: Call) -> None:
        """Fill output r with what rank r has in its input `index`. Sizes may all differ."""
        given = [as_bytes(tensor) for tensor in call.inputs]
        received = [as_bytes(tensor) for tensor in call.outputs]
        # Nobody knows what the others will send. Sizes first, also because a rank that expects something else
        # must be noticed while all are in step.
        sizes = self._exchange_sizes(given, received, call)
        column = BLOCK_BYTES // self._size // ALIGNMENT * ALIGNMENT
        places = self._team.places(Places(staging=self._staging.offset))

        def fill(block: int, half: torch.Tensor) -> None:
            for index, piece in enumerate(given):
                if index != self._index:
                    _put(half[index * column :], piece[block * column : (block + 1) * column])

        def drain(block: int, halves: list[torch.Tensor]) -> None:
            for index, target in enumerate(received):
                if index != self._index:
                    _get(halves[index][self._index * column :], target[block * column : (block + 1) * column])

        # By the largest piece of any rank: all ranks take equally many steps, whatever they send themselves.
        num_blocks = -(-max(max(row) for row in sizes) // column)
        if num_blocks:
            fill(0, self._staging.own(torch.uint8))
            self._team.step()
            self._relay(num_blocks, places, fill, drain)
        _keep(given[self._index], received[self._index])

    def _exchange_sizes(
        self, given: Sequence[torch.Tensor], received: Sequence[torch.Tensor], call: Call
    ) -> list[tuple[int, ...]]:
        """What every rank sends to each, once all have agreed that it is also what each expects."""
        row = struct.Struct(f"<{2 * self._size}q")
        areas = self._team.inline(row.size, torch.uint8)
        packed = row.pack(*(t.numel() for t in given), *(t.numel() for t in received))
        areas[self._index].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        self._team.open(signature(Verb.ALL_TO_ALL), call.timeout, Places(staging=self._staging.offset))
        rows = [row.unpack(bytes(area.tolist())) for area in areas]
        sent = [r[: self._size] for r in rows]
        for source in range(self._size):
            for target in range(self._size):
                expected = rows[target][self._size + source]
                if sent[source][target] != expected:
                    global_ranks = self._team.global_ranks
                    raise MismatchError(
                        f"rank {global_ranks[self._index]}: in all_to_all rank {global_ranks[source]} sends "
                        f"{sent[source][target]} bytes to rank {global_ranks[target]}, which expects {expected}. "
                        "Give output split sizes equal to the input split sizes of the other side."
                    )
        return sent

    # ---- ways

    def _receive(
        self, received: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], own: torch.Tensor
    ) -> None:
        for index, target in enumerate(received):
            if index == self._index:
                _keep(own, target)
            else:
                _get(sources[index], target)

    def _join_staging(self, places: list[Places], own: Places, fill: _Fill) -> None:
        """Let those whose data lies in shared memory, where not everybody's does, show it too."""
        if any(p.memory != NOWHERE for p in places):
            if own.memory != NOWHERE:
                fill(0, self._staging.own(torch.uint8))
            self._team.step()

    def _relay(self, num_blocks: int, places: list[Places], fill: _Fill, drain: _Drain) -> None:
        """Show and take `num_blocks` blocks, the first of which all ranks have shown."""
        for block in range(num_blocks):
            halves = self._staging.turn(places, torch.uint8)
            if block + 1 < num_blocks:
                fill(block + 1, self._staging.own(torch.uint8))
            drain(block, halves)
            # None after the last block: the half it lies in is filled again only after the next collective's
            # opening step (see `staging`).
            if block + 1 < num_blocks:
                self._team.step()


def _put(place: torch.Tensor, data: torch.Tensor) -> None:
    _copy(place[: data.numel()], data)


def _get(place: torch.Tensor, target: torch.Tensor) -> None:
    _copy(target, place[: target.numel()])


def _keep(data: torch.Tensor, target: torch.Tensor) -> None:
    if data.numel() and data.data_ptr() != target.data_ptr():
        _copy(target, data)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes: many of them as words, which torch does a fifth faster."""
    # torch makes a view as words only of bytes that begin at a whole word of their storage.
    odd = target.numel() % _WORD.itemsize
    if target.numel() < _MANY_BYTES or any(int(t.storage_offset()) % _WORD.itemsize for t in (target, source)):
        target.copy_(source)
        return
    end = target.numel() - odd
    target[:end].view(_WORD).copy_(source[:end].view(_WORD))
    if odd:
        target[end:].copy_(source[end:])
