"""The element partition: every bucket cut into equal slices, one a rank.

A step goes bucket by bucket: step the own slice of one, send it off, step the next while it travels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm.collectives import Collectives
from ..comm.memory.one_copy import allocate_one_copy
from ..errors import ConfigError
from ..observe import trace
from ..plan import Bucket, BucketCaps, BucketPlan, ParamSpec, build_plan
from ..plan.shards import Ownership, Span, element_ownership
from .gathering import Gathering
from .local import LocalOptimizer
from .partition import Held, Partition
from .roster import Roster
from .shard import Allocate, LivePiece, Shard

# As large as those of DistributedDataParallel: fewer collectives cost less than more overlap gains on one host,
# and several of these are under way at once in any model for which it matters.
CAP_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan, and the number in the optimizer of each of its parameters."""

    plan: BucketPlan
    numbers: tuple[int, ...]


def own_layouts(roster: Roster, numbers: Sequence[int]) -> list[Layout]:
    """Layouts for the parameters `numbers`, in their order.

    Frozen parameters get buckets of their own: they have no state, so mixed with the others they would
    leave some ranks with less of it.
    """
    layouts = []
    for trained in (True, False):
        chosen = tuple(n for n in numbers if roster.params[n].requires_grad is trained)
        if chosen:
            specs = [roster.specs[n] for n in chosen]
            layouts.append(Layout(build_plan(specs, BucketCaps((CAP_BYTES,)), range(len(specs))), chosen))
    return layouts


class Home(enum.Enum):
    """Where parameters live: in memory of their own, in that of their buckets, or in one copy for all ranks."""

    OWN = enum.auto()
    BUCKET = enum.auto()
    SHARED = enum.auto()


class ElementPartition(Partition):
    """Equal slices of the buckets of `layouts`, which together hold every parameter of the roster once."""

    name = "element"

    def __init__(
        self,
        roster: Roster,
        collectives: Collectives,
        layouts: Sequence[Layout],
        home: Home,
    ) -> None:
        super().__init__(roster, collectives)
        self.layouts = list(layouts)
        self.gathering = Gathering(collectives)
        self._home = home
        self.shards_of = [self._shards(layout) for layout in self.layouts]
        self.shards = [shard for shards in self.shards_of for shard in shards]
        self.gathering.provide(self.shards)
        if home is Home.SHARED:
            # Where parameters moved from may be shared as well, and must stay until everybody has left it.
            self.gathering.meet()

    def _shards(self, layout: Layout) -> list[Shard]:
        params = [self.roster.params[n] for n in layout.numbers]
        return [self._shard(bucket, layout, params) for bucket in layout.plan.buckets]

    def _shard(self, bucket: Bucket, layout: Layout, params: Sequence[torch.Tensor]) -> Shard:
        specs: Sequence[ParamSpec] = layout.plan.specs
        allocate: Allocate | None = None
        if self._home is not Home.OWN:
            allocate = self._share if self._home is Home.SHARED else self.collectives.allocate
        shared = self._home is Home.SHARED
        return Shard(bucket, specs, params, layout.numbers, self.collectives, allocate, shared)

    def _share(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise ConfigError(f"shared_parameters=True is for parameters on the processor, got some on {device}.")
        return allocate_one_copy(numel, dtype, self.collectives)

    @property
    def ownership(self) -> Ownership:
        of: list[tuple[Span, ...]] = [()] * len(self.roster.params)
        for layout in self.layouts:
            spans = element_ownership(layout.plan, self.collectives.world)
            for number, mine in zip(layout.numbers, spans, strict=True):
                of[number] = mine
        return tuple(of)

    @property
    def held(self) -> list[Held]:
        return [_held(piece) for shard in self.shards for piece in shard.pieces]

    def step(self, local: LocalOptimizer, closure: Any, arguments: dict[str, Any]) -> Any:
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.prepare()
            for shard in self.shards:
                if shard.is_due():
                    shard.refresh()
                    shard.take_gradients()
                    self.update(shard, local, arguments)
                    shard.drop_gradients()
            self.gathering.finish()
        return loss

    def prepare(self) -> None:
        """Before a step: return when parameters may be changed."""
        if self._home is Home.SHARED:
            # Another rank may still be computing with the parameters that this one is about to change.
            self.gathering.meet()

    def update(self, shard: Shard, local: LocalOptimizer, arguments: dict[str, Any]) -> None:
        """Step the pieces of one refreshed shard that have a gradient, and start gathering its bucket."""
        started_ns = trace.now_ns()
        local.step_some(self._active(shard), **arguments)
        shard.store()
        if trace.recorder is not None:
            trace.recorder.span(trace.OPTIMIZER, started_ns, trace.now_ns(), bucket=shard.index)
        self.gathering.launch(shard)
        # The transport writes behind autograd's back; a graph that still needs the old values must notice.
        increment_version(shard.params)

    def _active(self, shard: Shard) -> dict[int, list[torch.Tensor]]:
        active: dict[int, list[torch.Tensor]] = {}
        for piece in shard.pieces:
            if piece.tensor.grad is not None:
                active.setdefault(self.roster.group_of[piece.index], []).append(piece.tensor)
        return active


def _held(live: LivePiece) -> Held:
    piece = live.piece
    shape = (live.length,) if live.member.spec.shape else ()
    stride = (1,) if shape else ()
    return Held(live.index, piece.start, piece.stop, piece.begin, piece.end, shape, stride, live.tensor)
