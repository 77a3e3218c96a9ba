"""Order on a device: streams with vector clocks, and a ledger of who touched which bytes when.

Every stream counts its own operations. A clock says, per stream, up to which operation everything is known to be over. An
operation begins when all that its stream's clock names is over; so two accesses to the same bytes, at least one of them a
write, are in order exactly if the later one's clock covers the earlier one. Otherwise they are a race, whatever
the host did first. The host has a clock as well: what it has waited for is over for all that it launches afterwards.

Pure: knows no tensors and no torch.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGE = f"{Path('src', 'phalanx')}/"
_HERE = str(Path(__file__).parent)
_DEEPEST = 4  # frames of the package that a place names, unless asked for more

Clock = dict[int, int]


def joined(clock: Clock, other: Clock) -> None:
    """Everything that `other` knows to be over is over for `clock` too."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def place(deepest: int = _DEEPEST) -> str:
    """Where in the package the host is, innermost first; the nearest line outside this folder if it is not in there."""
    found: list[str] = []
    nearest = ""
    frame = sys._getframe(1)
    while frame is not None and len(found) < deepest:  # type: ignore[redundant-expr]
        name = frame.f_code.co_filename
        if _PACKAGE in name:
            found.append(f"{name.rpartition(_PACKAGE)[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        elif not nearest and not name.startswith(_HERE):
            nearest = f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or nearest or "host"


class Lane:
    """A stream as the ledger knows it: a number, and what is over for its next operation."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self.number = next(self._numbers)
        self.name = name
        self.clock: Clock = {}
        self.heard = 0
        """How much of what the host has waited for is in the clock (`Ledger.launch`)."""

    def tick(self) -> int:
        """The number of the operation that is launched now."""
        now = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = now
        return now


@dataclass(slots=True)
class Access:
    """One operation's use of a range of bytes."""

    low: int
    high: int
    writes: bool
    lane: int
    tick: int
    what: str


@dataclass(slots=True)
class Block:
    """One allocation: the stream that made it, whoever used it, and the streams named to the allocator."""

    owner: Lane
    what: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class HostSync:
    """The host waited for the device, or could have had to."""

    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of the same memory that nothing orders."""

    kind: str
    first: str
    second: str


class Ledger:
    """What happened since `reset`. One lock: hooks of one backward may run on several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.host: Clock = {}
        self._num_waits = 0
        self.syncs: list[HostSync] = []
        self.races: list[Race] = []
        self.num_operations = 0
        # Whether what the host waited for is over for what it launches. Without it, races that a host sync hides are seen.
        self.host_orders = True

    def reset(self) -> None:
        with self.lock:
            self.syncs, self.races, self.num_operations = [], [], 0

    def note_sync(self, kind: str, clock: Clock | None = None) -> None:
        """The host waits here; `clock` is what is over afterwards."""
        with self.lock:
            self.syncs.append(HostSync(kind, place()))
            self.host_waited(clock or {})

    def host_waited(self, clock: Clock) -> None:
        """All that `clock` names is over for the host."""
        joined(self.host, clock)
        self._num_waits += 1

    def launch(self, lane: Lane, reads: Iterable[Use], writes: Iterable[Use], name: str) -> int:
        """An operation enters a stream."""
        with self.lock:
            self.num_operations += 1
            # Clocks only grow, with every stream that there ever was: joined again only where the host has learnt something.
            if self.host_orders and lane.heard < self._num_waits:
                joined(lane.clock, self.host)
                lane.heard = self._num_waits
            tick = lane.tick()
            what = f"{name} on {lane.name} at {place()}"
            for block, ranges in reads:
                for low, high in ranges:
                    self._touch(block, Access(low, high, False, lane.number, tick, what), lane.clock)
            for block, ranges in writes:
                for low, high in ranges:
                    self._touch(block, Access(low, high, True, lane.number, tick, what), lane.clock)
            return tick

    def _touch(self, block: Block, new: Access, clock: Clock) -> None:
        kept = []
        for old in block.accesses:
            overlaps = old.low < new.high and new.low < old.high
            is_over = clock.get(old.lane, 0) >= old.tick
            if overlaps and not is_over and (old.writes or new.writes):
                self.races.append(Race("unordered", old.what, new.what))
            # What a later access covers in range, kind and order can no longer be the nearest predecessor of anything.
            covered = new.low <= old.low and old.high <= new.high and is_over
            if not (covered and (new.writes or (not old.writes and old.lane == new.lane))):
                kept.append(old)
        kept.append(new)
        block.accesses = kept

    def free(self, block: Block) -> None:
        """The last reference is gone: the owner's stream may have the memory again at once."""
        with self.lock:
            for access in block.accesses:
                known = max(block.owner.clock.get(access.lane, 0), self.host.get(access.lane, 0))
                if access.lane not in (block.owner.number, *block.recorded) and known < access.tick:
                    self.races.append(Race("freed while in use", access.what, f"freed at {place()}, made by {block.what}"))
            block.accesses = []


Use = tuple[Block, list[tuple[int, int]]]
