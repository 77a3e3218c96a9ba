"""What an optimizer of sharded state consists of: parameters, their division, the local optimizer, the state.

The public class above adds torch's signature; overlap adds another division and another moment to step. Here is
what both need: making a division, replacing it without losing state, and collecting or setting the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...plan.shards import Span
from ..partition.element import ElementPartition, Home, Layout, own_layouts
from ..partition.kinds import Choice, Kind
from ..partition.local import LocalOptimizer
from ..partition.param_table import Roster
from ..partition.parameter import ParameterPartition
from ..partition.partition import Partition
from .local_state import StateSlices, whole
from .transfer import Movement, merge_trees
from .tree import Tree

LayOut = Callable[[Roster], list[Layout]]


class Engine:
    """The division of `groups` among the ranks and everything that depends on it."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[dict[str, Any]],
        choice: Choice,
        collectives: Collectives,
        home: Home,
    ) -> None:
        self.choice = choice
        self.home = home
        self.collectives = collectives
        self.roster = Roster.of(groups)
        self.lay_out: LayOut = _lay_out_alone
        self.partition = self._divide(self.roster)
        self.local = LocalOptimizer(optimizer_class, defaults, groups, self.partition.members())
        # Whether any rank may hold state. Known without asking: the same things happen on every rank.
        self.has_state = False

    @property
    def optim(self) -> torch.optim.Optimizer:
        return self.local.optim

    def _divide(self, roster: Roster) -> Partition:
        if self.choice.partition == "parameter":
            coupled = self.choice.kind is Kind.COUPLED
            return ParameterPartition(roster, self.collectives, self.home is Home.BUCKET, coupled)
        return ElementPartition(roster, self.collectives, self.lay_out(roster), self.home)

    # -- other parameters, another plan --------------------------------------------------------

    def add_group(self, groups: Sequence[dict[str, Any]]) -> None:
        """The last of `groups` is new. Every rank calls it at the same point."""
        roster = Roster.of(groups)
        # Whatever may refuse the group comes before anything is changed.
        new = self._divide(roster)
        self.local.add_group(groups[-1])
        self._move(roster, new)
        self.local.push(groups)

    def redivide(self) -> None:
        """Divide anew and move the state there. Every rank calls it at the same point; nothing is lost."""
        self._move(self.roster, self._divide(self.roster))

    def _move(self, roster: Roster, new: Partition) -> None:
        old = self.partition
        slices = None
        if self.has_state:
            live = self._live()
            trees = self._merged(live)
            before, after = old.ownership, new.ownership
            slices = StateSlices.blank(new.held, trees, None)
            # Parameters that are new have no state to move.
            moving = Movement(trees, roster.specs, before + after[len(before) :], after, self.collectives)
            moving.run(live, slices, _devices(roster))
        self.roster, self.partition = roster, new
        self.local.reseat(new.members())
        if slices is not None:
            slices.install(self.optim.state)

    # -- state ---------------------------------------------------------------------------------

    def _live(self) -> StateSlices:
        return StateSlices.live(self.partition.held, self.optim.state, self.roster.names)

    def _merged(self, live: StateSlices) -> dict[int, Tree]:
        return merge_trees(live.trees, self.roster.params[0].device, self.collectives)

    def described(self) -> tuple[StateSlices, dict[int, Tree]]:
        """This rank's part of the state, and what the whole state looks like. Every rank calls it."""
        live = self._live()
        return live, self._merged(live)

    def collect(self, to: int) -> dict[int, Any] | None:
        """Every parameter's state, whole, in CPU memory of rank `to`; None elsewhere. Every rank calls it."""
        live, trees = self.described()
        mine = trees if self.collectives.rank == to else {}
        target = StateSlices.blank(whole(self.roster.specs), mine, torch.device("cpu"))
        everything = tuple((Span(0, spec.numel, to),) for spec in self.roster.specs)
        moving = Movement(trees, self.roster.specs, self.partition.ownership, everything, self.collectives)
        moving.run(live, target, _devices(self.roster))
        return dict(target.states) if self.collectives.rank == to else None

    def blank(self, trees: Mapping[int, Tree]) -> StateSlices:
        """Memory for this rank's part of the state that `trees` describe."""
        return StateSlices.blank(self.partition.held, trees, None)

    def set_state(self, slices: StateSlices) -> None:
        """Make `slices`, filled, the state. The same on every rank."""
        slices.install(self.optim.state)
        self.has_state = True


def _lay_out_alone(roster: Roster) -> list[Layout]:
    return own_layouts(roster, range(len(roster.params)))


def _devices(roster: Roster) -> dict[str, torch.device]:
    return {spec.device: param.device for spec, param in zip(roster.specs, roster.params, strict=True)}
