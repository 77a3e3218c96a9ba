"""Joining an optimizer to the backward pass of DistributedDataParallel.

    partition, hook        what the reducer does       `.grad` after backward    when a bucket is stepped
    element                reduce-scatter              scattered (see there)     as soon as its mean is there
    element, user's hook   what the hook does          the mean                  as soon as its mean is there
    parameter              all-reduce, or the hook     the mean                  all together, at the end

With `step_in_backward=False` nothing is stepped before `step()` is called, which makes room for clipping.
The plan may be replaced after the first backward, and again with another wrapper: the state then moves to the
new division before the next bucket is reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ddp.bucket import LiveBucket
from ..ddp.module import DistributedDataParallel
from ..ddp.reducer import Reducer
from ..ddp.wrappers import known_wrappers, listen
from ..errors import ConfigError, MismatchError, ReductionError
from .element import ElementPartition, Layout, own_layouts
from .engine import Engine
from .kinds import Kind
from .roster import Roster
from .scatter import ScatterReduction
from .scattered import ScatteredGradient
from .windows import GradientWindows

# The optimizer that a reducer works for. The latest wins; an earlier one says so when it is used.
# Weak on both sides: an engagement knows its reducer, so a strong value would keep its own key alive.
_latest: weakref.WeakKeyDictionary[Reducer, weakref.ref[Overlap]] = weakref.WeakKeyDictionary()


class Overlap:
    """One optimizer's engagement with one wrapper. `update` brackets an update: called with True, then False."""

    def __init__(
        self, engine: Engine, stage: int, step_in_backward: bool, update: Callable[[bool], dict[str, Any]]
    ) -> None:
        if engine.choice.kind is Kind.COUPLED:
            raise ConfigError(
                f"overlap_with_ddp=True is not possible with {type(engine.optim).__name__}, which evaluates the model "
                "several times a step. Use overlap_with_ddp=False."
            )
        self.engine = engine
        self.stage = stage
        self.in_backward = step_in_backward
        self.num_updates = 0
        self._bracket = update
        self._arguments: dict[str, Any] = {}
        self._updating = False
        self._torn = False
        self._stale = False
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._scatter: ScatterReduction | None = None
        self.windows: GradientWindows | None = None
        for wrapper in known_wrappers():
            if self._wrapper is None:
                self.consider(wrapper)
        listen(self.consider)

    # -- the wrapper ---------------------------------------------------------------------------

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper joined, while it lives."""
        return None if self._wrapper is None else self._wrapper()

    @property
    def reducer(self) -> Reducer:
        """The reducer of the wrapper joined. Raises where there is none."""
        wrapper = self.wrapper
        if wrapper is None:
            raise ConfigError(
                "overlap_with_ddp=True, but no phalanx.DistributedDataParallel wraps the parameters of this optimizer. "
                "Wrap the model, or use overlap_with_ddp=False."
            )
        latest = _latest.get(wrapper.reducer)
        if latest is None or latest() is not self:
            raise ConfigError(
                "another optimizer has been made with overlap_with_ddp=True for the same wrapper since. "
                "Use that one, or give all parameters to one optimizer."
            )
        return wrapper.reducer

    @property
    def scatter(self) -> ScatterReduction | None:
        """The reduction that scatters, if the reducer uses it."""
        return self._scatter if self._scatter is not None and self.scatters else None

    @property
    def scatters(self) -> bool:
        """Whether the reducer leaves each rank its slices only."""
        return self._scatter is not None and self.reducer.reduction is self._scatter

    def consider(self, wrapper: DistributedDataParallel) -> None:
        """Join `wrapper` if it reduces parameters of this optimizer."""
        reducer = wrapper._reducer
        if reducer is None or not any(param in self.engine.roster.index_of for param in reducer.params):
            return
        self._check(wrapper, reducer)
        self._wrapper = weakref.ref(wrapper)
        _latest[reducer] = weakref.ref(self)
        reducer.shadow_takes = True
        reducer.on_adopted.append(self._adopted)
        reducer.on_bucket_reduced.append(self._reduced)
        reducer.on_reduced.append(self._ended)
        if self.engine.choice.partition == "element" and wrapper._hook is None:
            self._scatter = ScatterReduction(
                reducer.collectives, reducer.patience, reducer, self, self.stage, self.in_backward
            )
            reducer.use(self._scatter)
        self._stale = True

    def _check(self, wrapper: DistributedDataParallel, reducer: Reducer) -> None:
        mine, theirs = self.engine.collectives.group, wrapper.process_group
        if mine is not theirs:
            raise ConfigError(
                "overlap_with_ddp=True needs the optimizer and DistributedDataParallel on the same process group. "
                "Give both the same process_group."
            )
        if wrapper.mixed_precision is not None:
            raise ConfigError(
                "overlap_with_ddp=True is not possible with mixed_precision: parameters are not in full precision "
                "while backward runs. Use overlap_with_ddp=False."
            )
        if self.engine.choice.partition == "element" and any(bucket.sparse for bucket in reducer.plan.buckets):
            names = [reducer.plan.specs[b.slots[0].param].name for b in reducer.plan.buckets if b.sparse]
            raise ConfigError(
                f"'{names[0]}' has sparse gradients, which cannot be scattered. Use Embedding(sparse=False), or "
                'partition="parameter".'
            )
        if self.stage == 2 and wrapper.gradient_as_bucket_view:
            raise ConfigError(
                "stage=2 frees gradients and gradient_as_bucket_view=True keeps memory for all of them. Use one of the two."
            )

    # -- the division --------------------------------------------------------------------------

    def _adopted(self) -> None:
        self._stale = True

    def catch_up(self) -> None:
        """Divide by the reducer's plan if it is another one by now. Every rank is here at the same point."""
        if not self._stale:
            return
        reducer = self.reducer
        if reducer.collectives.group is not self.engine.collectives.group:
            raise MismatchError(
                "the wrapper has changed to another process group, and part of the optimizer's state is with ranks of the "
                "old one. Save the state before the change, and load it into an optimizer on the new group."
            )
        engine = self.engine
        engine.lay_out, engine.as_views = self._lay_out, True
        if self.windows is not None and self.scatters:
            self.windows.park()
        engine.redivide()
        self._stale = False
        self.windows = None
        if self.scatter is not None and isinstance(engine.partition, ElementPartition):
            self.windows = GradientWindows(engine, engine.partition.shards_of[0], reducer.buckets, self.scatter)
            self.windows.unpark()

    def _lay_out(self, roster: Roster) -> list[Layout]:
        reducer = self.reducer
        for param, spec in zip(reducer.params, reducer.plan.specs, strict=True):
            if param not in roster.index_of:
                raise ConfigError(
                    f"DistributedDataParallel reduces '{spec.name}', which is not among this optimizer's parameters: with "
                    "overlap_with_ddp=True nobody would get its whole gradient. Give the optimizer all parameters, or "
                    "use overlap_with_ddp=False."
                )
        numbers = tuple(roster.index_of[param] for param in reducer.params)
        rest = sorted(set(range(len(roster.params))) - set(numbers))
        wrapped = set(self.wrapper.module.parameters()) if self.wrapper is not None else set()
        for number in rest:
            if roster.params[number].requires_grad and roster.params[number] not in wrapped:
                raise ConfigError(
                    f"{roster.names[number]} is not reduced by DistributedDataParallel: with overlap_with_ddp=True "
                    "nobody would step it. Leave it to another optimizer, or use overlap_with_ddp=False."
                )
        return [Layout(reducer.plan, numbers), *own_layouts(roster, rest)]

    # -- a backward that scatters --------------------------------------------------------------

    def begin(self, shadow: bool) -> None:
        """A reduced backward starts, here or (`shadow`) on the ranks that still have inputs."""
        self._refuse_torn()
        if self.reducer.context_id is not None:
            raise ReductionError(
                "overlap_with_ddp=True is not possible inside torch.distributed.autograd. Use overlap_with_ddp=False."
            )
        with torch.no_grad():
            self.catch_up()
            if self.windows is not None:
                self.windows.begin(shadow)

    def sent(self, bucket: LiveBucket) -> None:
        """The bucket has been packed: its local gradients are not needed any more."""
        if self.windows is not None:
            self.windows.release(bucket)

    def take(self, bucket: LiveBucket, factor: float, usage: Sequence[int] | None) -> None:
        """The bucket's own slice is reduced."""
        assert self.windows is not None, "a scattered bucket has a window"
        self.windows.receive(bucket, factor, usage)
        if self.in_backward:
            self._update(bucket.index)

    # -- a backward that leaves whole gradients ------------------------------------------------

    @torch.no_grad()
    def _reduced(self, bucket: LiveBucket) -> None:
        if self.scatters:
            return
        self.catch_up()
        partition = self.engine.partition
        if self.in_backward and isinstance(partition, ElementPartition):
            partition.shards_of[0][bucket.index].take_gradients()
            self._update(bucket.index)

    # -- updates -------------------------------------------------------------------------------

    def _refuse_torn(self) -> None:
        if self._torn or self._updating:
            self._torn = True
            raise ReductionError(
                "an earlier backward raised after some buckets had been updated and before the others were: the parameters "
                "are between two steps. Load a checkpoint of model and optimizer."
            )

    def _open(self) -> None:
        if not self._updating:
            self._arguments = self._bracket(True)
            self._updating = True

    def _update(self, index: int) -> None:
        """Step one bucket, in the midst of backward, and send it off."""
        partition = self.engine.partition
        assert isinstance(partition, ElementPartition), "only elements are stepped bucket by bucket"
        self._open()
        shard = partition.shards_of[0][index]
        shard.refresh()
        partition.update(shard, self.engine.local, self._arguments)

    @torch.no_grad()
    def _ended(self) -> None:
        """The backward has ended everywhere: finish the update, and follow a new plan."""
        if self.in_backward:
            partition = self.engine.partition
            self._open()
            if isinstance(partition, ElementPartition):
                partition.gathering.finish()
            else:
                partition.step(self.engine.local, None, self._arguments)
            if self.stage == 2 and not self.scatters:
                for param in self.engine.roster.params:
                    param.grad = None
            self._updating = False
            self.num_updates += 1
            self._bracket(False)
        self.catch_up()

    @torch.no_grad()
    def step(self, arguments: dict[str, Any]) -> None:
        """Step what backward left scattered, all buckets together (`step_in_backward=False`)."""
        partition, windows = self.engine.partition, self.windows
        if windows is None or not isinstance(partition, ElementPartition):
            self.refuse_unreduced()
            partition.step(self.engine.local, None, arguments)
            return
        windows.arm()
        for shards in partition.shards_of:
            for shard in shards:
                if shard.is_due():
                    shard.refresh()
                    if shards is not partition.shards_of[0]:
                        shard.take_gradients()
                    partition.update(shard, self.engine.local, arguments)
        partition.gathering.finish()

    def refuse_unreduced(self) -> None:
        """Raise if gradients have been accumulated that no backward has reduced."""
        for number, param in enumerate(self.engine.roster.params):
            grad = param.grad
            waiting = grad.pending is not None if isinstance(grad, ScatteredGradient) else grad is not None
            if waiting and (self.scatters or self.in_backward):
                raise ReductionError(
                    f"step() has nothing to step: {self.engine.roster.names[number]} has a gradient, but no backward has "
                    "reduced it since the last step. Run the last backward of each step outside no_sync()."
                )
