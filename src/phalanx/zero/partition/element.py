"""The element partition: every bucket cut into equal shards, one per rank.

A step goes bucket by bucket: step the own shard of one, send it off, step the next while it travels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm.collectives import Collectives
from ...comm.memory.one_copy import allocate_one_copy
from ...errors import ConfigError
from ...observe import trace
from ...plan import Bucket, BucketCaps, BucketPlan, ParamSpec, build_plan
from ...plan.shards import OwnedRange, Ownership, element_ownership
from . import one_copy
from .local import LocalOptimizer
from .param_table import ParamTable
from .partition import OwnedTensor, Partition, evaluate
from .shard import Allocate, Gathering, LiveSlice, Shard

# As large as those of DistributedDataParallel: fewer collectives cost less than more overlap gains on one host,
# and several of these are under way at once in any model for which it matters.
CAP_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class NumberedPlan:
    """A plan, and the number that each of its parameters has in the optimizer."""

    plan: BucketPlan
    numbers: tuple[int, ...]


def numbered_plans(table: ParamTable, numbers: Sequence[int]) -> list[NumberedPlan]:
    """Plans for the parameters `numbers`, in their order.

    Frozen parameters get buckets of their own: they have no state, so mixed with the others they would
    leave some ranks with less of it.
    """
    plans = []
    for trained in (True, False):
        chosen = tuple(n for n in numbers if table.params[n].requires_grad is trained)
        if chosen:
            specs = [table.specs[n] for n in chosen]
            plans.append(NumberedPlan(build_plan(specs, BucketCaps((CAP_BYTES,)), range(len(specs))), chosen))
    return plans


def _in_order_of(plans: Sequence[NumberedPlan], table: ParamTable) -> ParamTable:
    """The table with each parameter's elements in the order in which the plans cut them.

    That is the order of memory when the plan was made. A wrapper's plan may be older or newer than the optimizer's table,
    and memory may have changed in between (`Module.to(memory_format=…)`); state is counted as it is cut.
    """
    strides = {n: spec.stride for numbered in plans for n, spec in zip(numbered.numbers, numbered.plan.specs, strict=True)}
    return replace(table, specs=tuple(replace(spec, stride=strides[n]) for n, spec in enumerate(table.specs)))


class Placement(enum.Enum):
    """Where parameters live: in memory of their own, in that of their buckets, or in one copy for all ranks."""

    OWN = enum.auto()
    BUCKET = enum.auto()
    SHARED = enum.auto()


class ElementPartition(Partition):
    """Equal shards of the buckets of `plans`, which together hold every parameter of the table once."""

    name = "element"

    def __init__(
        self,
        table: ParamTable,
        collectives: Collectives,
        plans: Sequence[NumberedPlan],
        placement: Placement,
    ) -> None:
        super().__init__(_in_order_of(plans, table), collectives)
        self.plans = list(plans)
        self.gathering = Gathering(collectives)
        self._placement = placement
        # By plan, then by bucket. Where a wrapper reduces, its plan is the first, so that its bucket i has the shard [0][i].
        self.shards_of = [self._shards(numbered) for numbered in self.plans]
        self.shards = [shard for shards in self.shards_of for shard in shards]
        self.gathering.provide(self.shards)
        if placement is Placement.SHARED:
            one_copy.mark(param for shard in self.shards for param in shard.params)
            # Where parameters moved from may be shared as well, and must stay until everybody has left it.
            self.gathering.barrier()

    def _shards(self, numbered: NumberedPlan) -> list[Shard]:
        params = [self.table.params[n] for n in numbered.numbers]
        return [self._shard(bucket, numbered, params) for bucket in numbered.plan.buckets]

    def _shard(self, bucket: Bucket, numbered: NumberedPlan, params: Sequence[torch.Tensor]) -> Shard:
        specs: Sequence[ParamSpec] = numbered.plan.specs
        allocate: Allocate | None = None
        if self._placement is not Placement.OWN:
            allocate = self._share if self._placement is Placement.SHARED else self.collectives.allocate
        shared = self._placement is Placement.SHARED
        return Shard(bucket, specs, params, numbered.numbers, self.collectives, allocate, shared)

    def _share(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise ConfigError(f"shared_parameters=True is for parameters on the processor, got some on {device}.")
        return allocate_one_copy(numel, dtype, self.collectives)

    @property
    def ownership(self) -> Ownership:
        of: list[tuple[OwnedRange, ...]] = [()] * len(self.table.params)
        for numbered in self.plans:
            ranges = element_ownership(numbered.plan, self.collectives.world)
            for number, mine in zip(numbered.numbers, ranges, strict=True):
                of[number] = mine
        return tuple(of)

    @property
    def owned(self) -> list[OwnedTensor]:
        return [_owned_tensor(live) for shard in self.shards for live in shard.slices]

    def step(self, local: LocalOptimizer, closure: Any, arguments: dict[str, Any]) -> Any:
        loss = evaluate(closure)
        with torch.no_grad():
            self.prepare()
            if local.stepper is not None:
                local.stepper.begin(self.shards, arguments)
            due = self.due(local)
            # All before the first is stepped: what cannot be stepped is refused while nothing has changed.
            for shard in due:
                shard.refresh()
                shard.check_gradients()
            local.begin_update()
            for shard in due:
                shard.take_gradients()
                self.update(shard, local, arguments)
                # At once: slices are views of `.grad`, and would keep its memory alive beyond zero_grad().
                shard.drop_gradients()
            if local.stepper is not None:
                local.stepper.end()
            # Before this returns, parts of the parameters are still the old ones: nobody may compute with them.
            self.gathering.finish()
            local.update.end()
        return loss

    def due(self, local: LocalOptimizer) -> list[Shard]:
        """The shards that take part in a step. The same on all ranks, which must gather alike."""
        flags = local.agree_on_due([shard.is_due() for shard in self.shards])
        return [shard for shard, flag in zip(self.shards, flags, strict=True) if flag]

    def prepare(self) -> None:
        """Before a step: return when parameters may be changed."""
        if self._placement is Placement.SHARED:
            # Another rank may still be computing with the parameters that this one is about to change.
            self.gathering.barrier()

    def update(self, shard: Shard, local: LocalOptimizer, arguments: dict[str, Any]) -> None:
        """Step the slices of one refreshed shard that have a gradient, and start gathering its bucket."""
        started_ns = trace.now_ns()
        steps_elsewhere = local.stepper is not None and local.stepper.is_stepping
        if local.stepper is not None and steps_elsewhere:
            local.stepper.step(shard, arguments)
        else:
            local.step_some(self._active(shard), **arguments)
            # Before the launch: the gather reads the parameters' memory, and edges were stepped beside it.
            shard.store()
        if trace.recorder is not None:
            trace.recorder.span(trace.OPTIMIZER, started_ns, trace.now_ns(), bucket=shard.index)
        if not steps_elsewhere:
            self.gathering.launch(shard)
        # The transport writes behind autograd's back; a graph that still needs the old values must notice.
        increment_version(shard.params)

    def _active(self, shard: Shard) -> dict[int, list[torch.Tensor]]:
        active: dict[int, list[torch.Tensor]] = {}
        for live in shard.slices:
            # As the plain optimizer passes over a parameter without gradient: no decay, no momentum, no new state.
            if live.tensor.grad is not None:
                active.setdefault(self.table.group_of[live.index], []).append(live.tensor)
        return active


def _owned_tensor(live: LiveSlice) -> OwnedTensor:
    bounds = live.bounds
    # Flat, like the slice, except for scalars: an optimizer may treat a tensor without dimensions in another way.
    shape = (live.length,) if live.storage.spec.shape else ()
    stride = (1,) if shape else ()
    return OwnedTensor(live.index, bounds.start, bounds.stop, bounds.begin, bounds.end, shape, stride, live.tensor)
