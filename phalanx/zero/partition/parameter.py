"""The parameter partition: whole tensors to ranks, for optimizers that must see them whole.

The local optimizer runs on the parameters themselves. Afterwards each owner sends its own: large ones from
where they lie, small ones of one owner together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm.collectives import Collectives, Work
from ...observe import trace
from ...plan.shards import Ownership, greedy_owners, parameter_ownership
from .coupled import CoupledStep
from .local import LocalOptimizer
from .param_table import Roster
from .partition import Held, Partition
from .storage import ParameterStorage

_SMALL_BYTES = 64 * 1024
_SEGMENT_BYTES = 4 * 1024 * 1024


class Segment:
    """Parameters of one owner, dtype and device that travel together."""

    def __init__(
        self,
        owner: int,
        roster: Roster,
        numbers: Sequence[int],
        collectives: Collectives,
        as_views: bool,
    ) -> None:
        self.owner = owner
        self.params = [roster.params[n] for n in numbers]
        self.num_bytes = sum(roster.specs[n].num_bytes for n in numbers)
        specs = [roster.specs[n] for n in numbers]
        self._is_owner = owner == collectives.rank
        first = self.params[0]
        flat = None
        if as_views or len(numbers) > 1:
            flat = collectives.allocate(sum(spec.numel for spec in specs), first.dtype, first.device)
        homes: list[torch.Tensor | None] = [None] * len(specs)
        if as_views and flat is not None:
            homes = list(flat.split([spec.numel for spec in specs]))
        self.members = [
            ParameterStorage(param, spec, home)
            for param, spec, home in zip(self.params, specs, homes, strict=True)
        ]
        self._flat = flat
        self._copies = flat is not None and not as_views

    def is_due(self) -> bool:
        """Whether the segment travels after a step. The same on all ranks."""
        return any(param.requires_grad or param.grad is not None for param in self.params)

    def launch(self, collectives: Collectives) -> Work:
        """Send from the owner to all."""
        for member in self.members:
            member.refresh()
        flat = self.members[0].flat if self._flat is None else self._flat
        if self._copies and self._is_owner:
            torch.cat([member.flat for member in self.members], out=flat)
        return collectives.broadcast(flat, self.owner)

    def finish(self) -> None:
        """The owner's values have arrived."""
        if self._is_owner:
            return
        if self._copies and self._flat is not None:
            parts = self._flat.split([member.flat.numel() for member in self.members])
            for member, values in zip(self.members, parts, strict=True):
                member.flat.copy_(values)
        for member in self.members:
            member.publish()


class ParameterPartition(Partition):
    """Every parameter with one rank. With `coupled`, all of them with rank 0, because they are stepped together."""

    name = "parameter"

    def __init__(
        self,
        roster: Roster,
        collectives: Collectives,
        as_views: bool,
        coupled: bool,
    ) -> None:
        super().__init__(roster, collectives)
        self.coupled = coupled
        self.owners = _owners(roster, 1 if coupled else collectives.world)
        self.segments = [
            Segment(self.owners[numbers[0]], roster, numbers, collectives, as_views)
            for numbers in _segments(roster, self.owners)
        ]

    @property
    def ownership(self) -> Ownership:
        return parameter_ownership([spec.numel for spec in self.roster.specs], self.owners)

    @property
    def held(self) -> list[Held]:
        found = []
        for index, (param, spec) in enumerate(zip(self.roster.params, self.roster.specs, strict=True)):
            if self.owners[index] == self.collectives.rank:
                found.append(Held(index, 0, spec.numel, 0, spec.numel, spec.shape, spec.stride, param))
        return found

    def step(self, local: LocalOptimizer, closure: Any, arguments: dict[str, Any]) -> Any:
        if callable(closure) and self.coupled and self.collectives.world > 1:
            device = self.roster.params[0].device
            together = CoupledStep(self.collectives, device, self.share)
            result = together.run(local, closure, arguments)
        else:
            if closure is not None:
                arguments = {**arguments, "closure": self._synchronised(closure)}
            started_ns = trace.now_ns()
            result = local.step_all(**arguments)
            if trace.recorder is not None:
                trace.recorder.span(trace.OPTIMIZER, started_ns, trace.now_ns())
        self.share()
        return result

    def _synchronised(self, closure: Any) -> Any:
        """The closure for an optimizer that may call it again after changing this rank's parameters."""
        if not callable(closure):
            return closure
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self.share()
            return closure()

        return evaluate

    @torch.no_grad()
    def share(self) -> None:
        """Make every parameter equal on all ranks: each owner's values win."""
        started_ns = trace.now_ns()
        due = [segment for segment in self.segments if segment.is_due()]
        works = [segment.launch(self.collectives) for segment in due]
        for segment, work in zip(due, works, strict=True):
            self.collectives.wait(work, f"sending the parameters that rank {segment.owner} owns")
            segment.finish()
            increment_version(segment.params)
        if trace.recorder is not None:
            num_bytes = sum(segment.num_bytes for segment in due)
            trace.recorder.span(trace.GATHER, started_ns, trace.now_ns(), bytes=num_bytes)


def _owners(roster: Roster, world: int) -> tuple[int, ...]:
    """Trained and frozen parameters are balanced apart: only the former have state and need work."""
    owners = [0] * len(roster.params)
    for trained in (True, False):
        numbers = [n for n, param in enumerate(roster.params) if param.requires_grad is trained]
        chosen = greedy_owners([roster.specs[n].numel for n in numbers], world)
        for number, rank in zip(numbers, chosen, strict=True):
            owners[number] = rank
    return tuple(owners)


def _segments(roster: Roster, owners: Sequence[int]) -> list[list[int]]:
    """Which parameters travel together, in one order for all ranks."""
    segments: list[list[int]] = []
    filling: dict[tuple[int, str, torch.dtype, bool], tuple[list[int], int]] = {}
    for number, spec in enumerate(roster.specs):
        if not spec.numel:
            continue
        kind = (owners[number], spec.device, spec.dtype, roster.params[number].requires_grad)
        numbers, num_bytes = filling.get(kind, ([], _SEGMENT_BYTES))
        if spec.num_bytes >= _SMALL_BYTES:
            segments.append([number])
        elif num_bytes + spec.num_bytes > _SEGMENT_BYTES:
            filling[kind] = ([number], spec.num_bytes)
            segments.append(filling[kind][0])
        else:
            numbers.append(number)
            filling[kind] = (numbers, num_bytes + spec.num_bytes)
    return segments
