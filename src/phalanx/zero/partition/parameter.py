"""The parameter partition: whole tensors to ranks, for optimizers that must see them whole.

The local optimizer runs on the parameters themselves. Afterwards each owner sends its own: large ones from
where they lie, small ones of one owner together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm.collectives import Collectives, Work
from ...errors import ArgumentTypeError
from ...observe import trace
from ...plan.shards import Ownership, greedy_owners, parameter_ownership
from .coupled import CoupledStep
from .local import LocalOptimizer
from .param_table import ParamTable
from .partition import OwnedTensor, Partition
from .storage import ParameterStorage

# A broadcast has a fixed cost, so smaller parameters are copied into one buffer with others of their owner; larger ones
# travel from where they lie. The second bounds that buffer, which stays allocated as long as the partition.
_SMALL_BYTES = 64 * 1024
_BUCKET_BYTES = 4 * 1024 * 1024


class BroadcastBucket:
    """Parameters of one owner, dtype and device that travel together."""

    def __init__(
        self,
        owner: int,
        table: ParamTable,
        numbers: Sequence[int],
        collectives: Collectives,
        as_views: bool,
    ) -> None:
        self.owner = owner
        self.params = [table.params[n] for n in numbers]
        self.num_bytes = sum(table.specs[n].num_bytes for n in numbers)
        specs = [table.specs[n] for n in numbers]
        self._is_owner = owner == collectives.rank
        first = self.params[0]
        flat = None
        # Allocated by the collectives, so that on shared memory it can be read by the others without another copy.
        if as_views or len(numbers) > 1:
            flat = collectives.allocate(sum(spec.numel for spec in specs), first.dtype, first.device)
        views: list[torch.Tensor | None] = [None] * len(specs)
        if as_views and flat is not None:
            views = list(flat.split([spec.numel for spec in specs]))
        self.storages = [
            ParameterStorage(param, spec, view)
            for param, spec, view in zip(self.params, specs, views, strict=True)
        ]
        self._flat = flat
        self._copies = flat is not None and not as_views

    def is_due(self) -> bool:
        """Whether the bucket travels after a step, as far as this rank knows (`LocalOptimizer.agree_on_due`)."""
        # Not by the gradients alone: this rank may be without one that others have.
        return any(param.requires_grad or param.grad is not None for param in self.params)

    def check(self) -> None:
        """Refuse parameters that have become others."""
        for storage in self.storages:
            if storage.has_moved:
                storage.check()

    def launch(self, collectives: Collectives) -> Work:
        """Send from the owner to all."""
        # Users may have given parameters other memory since the last step.
        for storage in self.storages:
            storage.refresh()
        flat = self.storages[0].flat if self._flat is None else self._flat
        if self._copies and self._is_owner:
            torch.cat([storage.flat for storage in self.storages], out=flat)
        return collectives.broadcast(flat, self.owner)

    def finish(self) -> None:
        """The owner's values have arrived."""
        if self._is_owner:
            return
        # Only what was packed has to be taken apart; views and single parameters have received in place.
        if self._copies and self._flat is not None:
            parts = self._flat.split([storage.flat.numel() for storage in self.storages])
            for storage, values in zip(self.storages, parts, strict=True):
                storage.flat.copy_(values)
        for storage in self.storages:
            storage.publish()


class ParameterPartition(Partition):
    """Every parameter with one rank. With `coupled`, all of them with rank 0, because they are stepped together."""

    name = "parameter"

    def __init__(
        self,
        table: ParamTable,
        collectives: Collectives,
        as_views: bool,
        coupled: bool,
    ) -> None:
        super().__init__(table, collectives)
        self.coupled = coupled
        # Coupled: one owner, and the others only evaluate (see `coupled`).
        self.owners = _owners(table, 1 if coupled else collectives.world)
        self.buckets = [
            BroadcastBucket(self.owners[numbers[0]], table, numbers, collectives, as_views)
            for numbers in _buckets(table, self.owners)
        ]

    @property
    def ownership(self) -> Ownership:
        return parameter_ownership([spec.numel for spec in self.table.specs], self.owners)

    @property
    def owned(self) -> list[OwnedTensor]:
        found = []
        for index, (param, spec) in enumerate(zip(self.table.params, self.table.specs, strict=True)):
            if self.owners[index] == self.collectives.rank:
                found.append(OwnedTensor(index, 0, spec.numel, 0, spec.numel, spec.shape, spec.stride, param))
        return found

    def step(self, local: LocalOptimizer, closure: Any, arguments: dict[str, Any]) -> Any:
        # Before anything is stepped: what could not be sent afterwards is refused while nothing has changed.
        for bucket in self.buckets:
            bucket.check()
        if self.coupled and not callable(closure):
            raise ArgumentTypeError(
                f"step() of {type(local.optim).__name__} needs a closure that evaluates the model and returns the loss, got "
                f"{closure!r:.80}. Nothing was changed: call step(closure) on every rank."
            )
        if callable(closure) and self.coupled and self.collectives.world > 1:
            device = self.table.params[0].device
            together = CoupledStep(self.collectives, device, partial(self.share, local))
            result = together.run(local, closure, arguments)
        else:
            if closure is None:
                local.begin_update()
            else:
                arguments = {**arguments, "closure": self._synchronised(closure, local)}
            started_ns = trace.now_ns()
            result = local.step_all(**arguments)
            if trace.recorder is not None:
                trace.recorder.span(trace.OPTIMIZER, started_ns, trace.now_ns())
        self.share(local)
        # Not begun by a class that takes no notice of its closure.
        if local.update.is_under_way:
            local.update.end()
        return result

    def _synchronised(self, closure: Any, local: LocalOptimizer) -> Any:
        """The closure for an optimizer that may call it again after changing this rank's parameters."""
        if not callable(closure):
            local.update.begin()
            return closure

        def evaluate() -> Any:
            # At the first call parameters are still equal everywhere; later the optimizer has moved the owned ones.
            if local.update.is_under_way:
                self.share(local)
                local.update.end()
            # What a closure raises leaves parameters whole, as with the plain optimizer.
            result = closure()
            local.update.begin()
            return result

        return evaluate

    @torch.no_grad()
    def share(self, local: LocalOptimizer) -> None:
        """Make every parameter equal on all ranks: each owner's values win."""
        started_ns = trace.now_ns()
        flags = local.agree_on_due([bucket.is_due() for bucket in self.buckets])
        due = [bucket for bucket, flag in zip(self.buckets, flags, strict=True) if flag]
        # All at once: owners are different ranks, which then send at the same time. The order is that of the numbers of
        # parameters, the same on every rank.
        works = [bucket.launch(self.collectives) for bucket in due]
        for bucket, work in zip(due, works, strict=True):
            owner = self.collectives.ranks.numbers[bucket.owner]
            self.collectives.wait(work, f"sending the parameters that rank {owner} owns")
            bucket.finish()
            # The broadcast wrote behind autograd's back; a graph that still needs the old values must notice.
            increment_version(bucket.params)
        if trace.recorder is not None:
            num_bytes = sum(bucket.num_bytes for bucket in due)
            trace.recorder.span(trace.GATHER, started_ns, trace.now_ns(), bytes=num_bytes)


def _owners(table: ParamTable, world: int) -> tuple[int, ...]:
    """Trained and frozen parameters are balanced apart: only the former have state and need work."""
    owners = [0] * len(table.params)
    for trained in (True, False):
        numbers = [n for n, param in enumerate(table.params) if param.requires_grad is trained]
        chosen = greedy_owners([table.specs[n].numel for n in numbers], world)
        for number, rank in zip(numbers, chosen, strict=True):
            owners[number] = rank
    return tuple(owners)


def _buckets(table: ParamTable, owners: Sequence[int]) -> list[list[int]]:
    """Which parameters travel together, in one order for all ranks."""
    buckets: list[list[int]] = []
    filling: dict[tuple[int, str, torch.dtype, bool], tuple[list[int], int]] = {}
    for number, spec in enumerate(table.specs):
        if not spec.numel:
            continue
        key = (owners[number], spec.device, spec.dtype, table.params[number].requires_grad)
        numbers, num_bytes = filling.get(key, ([], _BUCKET_BYTES))
        if spec.num_bytes >= _SMALL_BYTES:
            buckets.append([number])
        elif num_bytes + spec.num_bytes > _BUCKET_BYTES:
            # The full one is in `buckets` already, where it keeps its place in the order of launches.
            filling[key] = ([number], spec.num_bytes)
            buckets.append(filling[key][0])
        else:
            numbers.append(number)
            filling[key] = (numbers, num_bytes + spec.num_bytes)
    return buckets
