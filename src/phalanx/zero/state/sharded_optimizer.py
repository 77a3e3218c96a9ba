"""What an optimizer of sharded state consists of: parameters, their partition, the local optimizer, the state.

The public class above adds torch's signature; overlap adds another partition and another moment to step. Here is
what both need: making a partition, replacing it without losing state, and collecting or setting the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...ddp.messages import torn
from ...errors import MismatchError, StateError
from ...plan import ParamSpec
from ...plan.shards import OwnedRange
from ..partition.element import ElementPartition, NumberedPlan, Placement, numbered_plans
from ..partition.kinds import Kind, PartitionChoice, steps_sparse
from ..partition.local import LocalOptimizer
from ..partition.param_table import ParamTable
from ..partition.parameter import ParameterPartition
from ..partition.partition import Partition, evaluate
from ..partition.shard import SparseGradient
from ..partition.storage import flatten, unflatten
from ..partition.update import TORN, Update
from .local_state import LocalState, whole
from .transfer import StateTransfer, merge_trees
from .tree import Tree, leaves_of

MakePlans = Callable[[ParamTable], list[NumberedPlan]]


class ShardedOptimizer:
    """The partition of `groups` among the ranks and everything that depends on it."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[dict[str, Any]],
        choice: PartitionChoice,
        collectives: Collectives,
        placement: Placement,
    ) -> None:
        self.choice = choice
        self.placement = placement
        self.collectives = collectives
        # Replaced by `overlap` once there is a wrapper: then buckets are those that the wrapper reduces.
        self.make_plans: MakePlans = plans_alone
        self.partition = self._make_partition(ParamTable.of(groups))
        self.local = self._make_local(optimizer_class, defaults, groups)

    def _make_local(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> LocalOptimizer:
        """The optimizer of this rank's part, once every rank has made its own. Every rank calls it."""
        try:
            made: LocalOptimizer | Exception = LocalOptimizer(
                optimizer_class, defaults, groups, self.partition.params_by_group()
            )
        # Whatever a user's class raises.
        except Exception as error:
            made = error
        # A class may refuse parameters that only some ranks own (Muon: of other than two dimensions). Those would raise
        # alone, and the others wait for them in the next collective.
        refusal = f"{type(made).__name__}: {made}" if isinstance(made, Exception) else "nothing"
        try:
            self.collectives.agree(f"making {optimizer_class.__name__} for each rank's part", {"raised": refusal})
        except MismatchError:
            if not isinstance(made, Exception):
                raise
        if isinstance(made, Exception):
            raise made
        return made

    @property
    def optim(self) -> torch.optim.Optimizer:
        return self.local.optim

    @property
    def table(self) -> ParamTable:
        """The parameters, each with its elements in the order in which the partition counts them."""
        return self.partition.table

    def _make_partition(self, table: ParamTable) -> Partition:
        # One rank by itself steps them in turn, where they are, as the plain optimizer does.
        if self.collectives.world > 1 or self.placement is not Placement.OWN:
            table.check_apart()
        if self.choice.partition == "parameter":
            coupled = self.choice.kind is Kind.COUPLED
            return ParameterPartition(table, self.collectives, self.placement is Placement.BUCKET, coupled)
        return ElementPartition(table, self.collectives, self.make_plans(table), self.placement)

    @property
    def update(self) -> Update:
        """What has become of the latest update."""
        return self.local.update

    def take_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step by the options in `groups` from now on; they have the parameters that were divided."""
        self.table.check_groups(groups)
        self.local.pull(groups)

    def refuse_torn(self) -> None:
        """Raise if an update raised midway. The others, who may wait for this rank, are told."""
        if self.update.state is TORN:
            error = torn(self.collectives.me)
            self.collectives.board.post_error(error)
            raise error

    def step(self, closure: Any, arguments: dict[str, Any]) -> Any:
        """Step by the parameters' `.grad`; returns what the optimizer or the closure returned. Every rank calls it."""
        if not (self.choice.is_free and callable(closure)):
            return self._step(closure, arguments)
        # Element by element, an optimizer evaluates a closure once, first of all.
        loss = evaluate(closure)
        self._step(None, arguments)
        return loss

    def _step(self, closure: Any, arguments: dict[str, Any]) -> Any:
        try:
            return self.partition.step(self.local, closure, arguments)
        except SparseGradient as error:
            # All ranks see it before anything has changed: the layout of means is the same everywhere.
            if not self.use_whole_parameters("gradients are sparse"):
                raise error from None
        return self.partition.step(self.local, closure, arguments)

    def use_whole_parameters(self, reason: str) -> bool:
        """Give whole parameters to ranks from now on, if nobody asked for elements and the class takes sparse gradients."""
        alone = self.local.stepper is None and self.placement is not Placement.SHARED
        if not (self.choice.is_free and alone and steps_sparse(self.optim)):
            return False
        self.choice = PartitionChoice("parameter", self.choice.kind, reason)
        self.repartition()
        return True

    # -- other parameters, another plan --------------------------------------------------------

    def add_group(self, groups: Sequence[dict[str, Any]]) -> None:
        """The last of `groups` is new. Every rank calls it at the same point."""
        # Whatever may refuse the group comes before anything is changed.
        new = self._make_partition(ParamTable.of(groups))
        self.local.add_group(groups[-1])
        # Options that were changed since the last step are not in the local optimizer yet, and would be taken back below.
        self.local.pull(groups)
        self._move(new)
        self.local.push(groups)

    def repartition(self) -> None:
        """Make the partition anew and move the state there. Every rank calls it at the same point; nothing is lost."""
        # Making it may move parameters into other memory; their values, and the state of the old partition, stay. The
        # model may be of another dtype by now (`Module.double`), with frozen parameters of which no wrapper's plan tells.
        self._move(self._make_partition(self.table.in_current_dtypes()))

    def _move(self, new: Partition) -> None:
        # Also before the first step: some classes (Adagrad) have state from their construction on, and a rank that owns
        # nothing yet cannot know.
        live, trees = self.described()
        before, after = self.partition.ownership, new.ownership
        moved = LocalState.blank(new.owned, trees, None)
        # Counted otherwise by the new partition: a range of elements is another one there.
        reordered = {n for n in trees if self.table.specs[n].stride != new.table.specs[n].stride}
        ranges = {n: tree for n, tree in trees.items() if n not in reordered}
        # Parameters that are new have no state to move, whoever is said to have owned them.
        transfer = StateTransfer(ranges, new.table.specs, before + after[len(before) :], after, self.collectives)
        transfer.run(live, moved, _devices(new.table))
        for number in sorted(reordered):
            self._reorder(number, live, trees, moved, new.table.specs[number])
        # Only now, when all has arrived: a rank that fails on the way leaves the others with a whole optimizer.
        self.partition = new
        self.local.use_params(new.params_by_group())
        moved.install(self.optim.state)

    def _reorder(
        self, number: int, live: LocalState, trees: Mapping[int, Tree], moved: LocalState, spec: ParamSpec
    ) -> None:
        """Give each rank its part of one parameter's state, of which the elements come in another order: that of `spec`."""
        one = {number: trees[number]}
        for rank in range(self.collectives.world):
            # One rank after the other has the whole of it for a moment, which is one parameter's.
            held = self._gather(live, one, rank)
            for leaf in leaves_of(trees[number]) if rank == self.collectives.rank else ():
                (extent,) = held.extents[number, leaf.path]
                values = extent.values
                if leaf.shape is None:
                    values = flatten(unflatten(values, self.table.specs[number]), spec)
                moved.write(number, leaf.path, 0, values.numel(), values)

    # -- state ---------------------------------------------------------------------------------

    def described(self) -> tuple[LocalState, dict[int, Tree]]:
        """This rank's part of the state, and what the whole state looks like. Every rank calls it."""
        live = LocalState.live(self.partition.owned, self.optim.state, self.table.names)
        return live, merge_trees(live.trees, self.table.params[0].device, self.collectives)

    def collect(self, to: int) -> dict[int, Any] | None:
        """Every parameter's state, whole, in CPU memory of rank `to`; None elsewhere. Every rank calls it."""
        held = self._gather(*self.described(), to)
        return dict(held.states) if self.collectives.rank == to else None

    def _gather(self, live: LocalState, trees: Mapping[int, Tree], to: int) -> LocalState:
        """The states that `trees` describe, whole, in CPU memory of rank `to`; nothing elsewhere."""
        # The other ranks make no memory. They still know the whole schedule, and take part in every round of it.
        mine = trees if self.collectives.rank == to else {}
        # In CPU memory: the whole state may be more than an accelerator has, which is why it was sharded.
        target = LocalState.blank(whole(self.table.specs), mine, torch.device("cpu"))
        everything = tuple((OwnedRange(0, spec.numel, to),) for spec in self.table.specs)
        transfer = StateTransfer(trees, self.table.specs, self.partition.ownership, everything, self.collectives)
        transfer.run(live, target, _devices(self.table))
        return target

    def blank(self, trees: Mapping[int, Tree]) -> LocalState:
        """Memory for this rank's part of the state that `trees` describe."""
        return LocalState.blank(self.partition.owned, trees, None)

    def set_state(self, local: LocalState) -> None:
        """Make `local`, filled, the state. The same on every rank."""
        local.install(self.optim.state)

    def forget_state(self) -> None:
        """Have none on this rank, as before the first step. The same on every rank."""
        if self.local.stepper is not None:
            raise StateError("an elastic run keeps its optimizer's state, which cannot be emptied. Make the optimizer anew.")
        self.optim.state.clear()


def plans_alone(table: ParamTable) -> list[NumberedPlan]:
    """Plans for all parameters, where those of a wrapper do not count."""
    return numbered_plans(table, range(len(table.params)))


def _devices(table: ParamTable) -> dict[str, torch.device]:
    return {spec.device: param.device for spec, param in zip(table.specs, table.params, strict=True)}
