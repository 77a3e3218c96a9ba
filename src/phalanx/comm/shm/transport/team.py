"""The ranks of one host in one group: their control blocks, and the steps they take together.

A team is the ranks of a group that run on this host. Everything it does is a sequence of steps. In a
step each rank signals all others, then waits for a signal from each; what was stored before the signal
may be read after the wait. All ranks take the same steps in the same order, because each collective
begins with the step `open`, in which they compare what they are about to do.

A rank's control block is a piece of its shared memory that all can read: two headers and two inline
areas (for small data), used in turn by successive collectives. A rank writes into the pair of collective
n + 2 only after the first step of n + 1, which no peer takes before it has finished n; hence the pair of n
is no longer read.

This module knows steps, not what is computed between them, nor how a wait can fail (`link`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from ....errors import CommunicationError, MismatchError
from ...memory.arena import Arena
from .call import PACKED_BYTES, Signature, different_calls, unpacked
from .link import Link, Watch

INLINE_BYTES = 256 * 1024  # what a rank can hand over in the opening step itself
NOWHERE = -1

_PROGRESS = struct.Struct("<Q")
_PLACES = struct.Struct("<qqq")
_HEADER_BYTES = 128
_HEADERS_AT = 64
_INLINE_AT = 4096
_CONTROL_BYTES = _INLINE_AT + 2 * INLINE_BYTES
_MAX_CACHED_VIEWS = 256

# Called with the collective, the number of the step in it, and "before", "signalled" or "after".
Observer = Callable[[str, int, str], None]


class Places(NamedTuple):
    """Where a rank's data for the collective at hand lies, as far as others may reach it."""

    memory: int = NOWHERE  # offset in the memory handed out to users
    staging: int = NOWHERE  # offset in the arena of the control block
    numel: int = 0  # how many elements the rank contributes


NO_PLACES = Places()


class ControlBlock:
    """A rank's own control block. Made before the rendezvous, so that no peer can look for it too early."""

    def __init__(self) -> None:
        self.arena = Arena("phalanx-control")
        # The first thing allocated in its arena, so that it lies at the same offset in everybody's.
        self._block = self.arena.allocate(_CONTROL_BYTES, torch.uint8)
        offset = self.arena.locate(self._block)
        assert offset is not None, "the control block was allocated in its own arena"
        self.offset = offset


class Team:
    """This process's view of its team. One thread at a time takes steps; any may `break_`.

    `global_ranks` are the group's ranks in the order of the team, `links` the peers by rank.
    """

    def __init__(
        self, global_rank: int, global_ranks: Sequence[int], links: Mapping[int, Link], control: ControlBlock, memory: Arena
    ) -> None:
        self.global_ranks = tuple(global_ranks)
        self.index = self.global_ranks.index(global_rank)
        self.size = len(self.global_ranks)
        self.memory = memory
        self.observer: Observer | None = None
        self.watch = Watch(global_rank, [links[peer] for peer in self.global_ranks if peer != global_rank])
        self._control = control
        self._controls = [control.arena if r == global_rank else links[r].control for r in self.global_ranks]
        self._memories = [memory if r == global_rank else links[r].memory for r in self.global_ranks]
        self._own_page, self._own_at = control.arena.mapping(control.offset)
        self._peer_pages = [link.control.mapping(control.offset) for link in self.watch.links]
        self._outboxes = [link.outbox for link in self.watch.links]
        self._timeout_s = 0.0
        self._sequence = 0  # of the collective to open next
        self._num_steps = 0  # taken since the team met
        self._step = 0  # of the collective under way
        self._signature: Signature | None = None
        self._inline: dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def inline(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Everybody's inline area for the next collective, by index, as `numel` elements."""
        # Here as well as in each step: a rank that has failed must leave its control block alone, which a slower
        # one may still be reading.
        self.watch.check()
        pair = self._inline.get((numel, dtype))
        if pair is None:
            if len(self._inline) == _MAX_CACHED_VIEWS:
                self._inline.clear()
            first = self._control.offset + _INLINE_AT
            pair = (
                [control.view(first, numel, dtype) for control in self._controls],
                [control.view(first + INLINE_BYTES, numel, dtype) for control in self._controls],
            )
            self._inline[numel, dtype] = pair
        return pair[self._sequence & 1]

    def open(self, what: Signature, timeout: timedelta, places: Places = NO_PLACES) -> None:
        """Begin a collective: publish what this rank is about to do, meet all, and compare.

        What was written into this rank's inline area before is visible to all afterwards. A rank with
        another signature is a `MismatchError` on every rank, and leaves the team as usable as before.
        """
        self.watch.check()
        self._timeout_s = timeout.total_seconds()
        self._signature = what
        self._step = 0
        self.watch.doing = what.name
        at = _HEADERS_AT + (self._sequence & 1) * _HEADER_BYTES
        header = what.packed + _PLACES.pack(*places)
        self._own_page[self._own_at + at : self._own_at + at + len(header)] = header
        self._sequence += 1
        self.step()
        for page, page_at in self._peer_pages:
            if page[page_at + at : page_at + at + PACKED_BYTES] != what.packed:
                raise self._mismatch(what, at)

    def places(self, own: Places) -> list[Places]:
        """What each rank gave as its places when the collective under way was opened."""
        at = _HEADERS_AT + (self._sequence - 1 & 1) * _HEADER_BYTES + PACKED_BYTES
        all_places = [Places(*_PLACES.unpack_from(page, page_at + at)) for page, page_at in self._peer_pages]
        all_places.insert(self.index, own)
        return all_places

    def step(self) -> None:
        """Signal all peers, then wait for all of them."""
        self.watch.check()
        if self.observer is not None:
            self._observe("before")
        self._num_steps += 1
        _PROGRESS.pack_into(self._own_page, self._own_at, self._num_steps)
        for outbox in self._outboxes:
            os.eventfd_write(outbox, 1)
        if self.observer is not None:
            self._observe("signalled")
        for link in self.watch.links:
            if not link.arrived():
                self.watch.wait(link, self._timeout_s, self._stragglers)
        if self.observer is not None:
            self._observe("after")
        self._step += 1

    def view(self, index: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that rank `index` of the team was handed by `allocate`."""
        return self._memories[index].view(offset, numel, dtype)

    def staging(self, index: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that rank `index` of the team took from the arena of its control block."""
        return self._controls[index].view(offset, numel, dtype)

    def allocate_staging(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Memory for the team's own use, never reused for anything else, and its offset."""
        staging = self._control.arena.allocate(num_bytes, torch.uint8)
        offset = self._control.arena.locate(staging)
        assert offset is not None, "the staging buffer was allocated in the arena of the control block"
        return staging, offset

    def fail(self, error: BaseException) -> None:
        """Break the team because of what happened in this process in the middle of a collective."""
        rank = self.global_ranks[self.index]
        text = f"rank {rank} failed in {self.watch.doing}: {type(error).__name__}: {error}"
        self.watch.break_(CommunicationError(text, (rank,)))

    def close(self) -> None:
        """Close every descriptor. No thread may be in a step."""
        self.watch.close()
        self._control.arena.close()

    def _stragglers(self, waited_for: int) -> list[int]:
        """The ranks that keep this one waiting: of those absent, the ones with the fewest steps."""
        steps = {
            link.peer: _PROGRESS.unpack_from(page, page_at)[0]
            for link, (page, page_at) in zip(self.watch.links, self._peer_pages, strict=True)
        }
        behind = {peer: count for peer, count in steps.items() if count < self._num_steps}
        if not behind:
            # It has written its count, and has not signalled yet. Or it has just gone on, being let go by a rank that gave
            # up before this one: whoever has fewer steps than it now is that one, which is not at fault.
            return [waited_for]
        return [peer for peer, count in behind.items() if count == min(behind.values())]

    def _mismatch(self, what: Signature, at: int) -> MismatchError:
        calls = [unpacked(page[a + at : a + at + PACKED_BYTES]) for page, a in self._peer_pages]
        calls.insert(self.index, what)
        return different_calls(self.global_ranks[self.index], self.global_ranks, calls)

    def _observe(self, moment: str) -> None:
        assert self.observer is not None and self._signature is not None
        self.observer(self._signature.name, self._step, moment)
