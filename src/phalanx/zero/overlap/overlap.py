"""Joining an optimizer to the backward pass of DistributedDataParallel.

    partition, hook        what the reducer does       `.grad` after backward    when a bucket is stepped
    element                reduce-scatter              scattered (see there)     as soon as its mean is there
    element, user's hook   what the hook does          the mean                  as soon as its mean is there
    element, low precision all-reduce, or the hook     the mean                  all together, at the end
    parameter              all-reduce, or the hook     the mean                  all together, at the end

Where DistributedDataParallel has mixed_precision, parameters are in full precision only when backward has ended.
The first backward that a wrapper reduces is reduced whole, because the plan that it leads to is another one: buckets
are divided once that is known, and the update is made then.
With `step_in_backward=False` nothing is stepped before `step()` is called, which makes room for clipping.
The plan may be replaced after the first backward, and again with another wrapper: the state then moves to the
new partition before the next bucket is reduced.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...ddp.buckets.bucket import Bucket
from ...ddp.buckets.dense import DenseBucket
from ...ddp.module import DistributedDataParallel
from ...ddp.reducer import AllReduce, HookStrategy, Listener, Reducer, Strategy
from ...ddp.wrappers import known_wrappers, listen
from ...errors import ConfigError, MismatchError, ReductionError
from ..partition.element import ElementPartition, NumberedPlan, Placement
from ..partition.kinds import Kind
from ..partition.param_table import ParamTable
from ..partition.update import UNCONFIRMED, Update
from ..state.sharded_optimizer import ShardedOptimizer, plans_alone
from .gradient_shards import GradientShards, ScatteredGradient, fill_zeroed
from .left_wrapper import LeftWrapper, take_over
from .reduce_scatter import ReduceScatter
from .used_gradients import UsedGradients
from .wrapper_plans import check_wrapper, plans_of_wrapper, wider_plan

# On a hook that does what happens without it, so that the reduction that scatters may take its place.
REPLACEABLE = "_phalanx_replaceable"

# The optimizer that a reducer works for. The latest wins; an earlier one says so when it is used.
# Weak on both sides: an engagement knows its reducer, so a strong value would keep its own key alive.
_latest: weakref.WeakKeyDictionary[Reducer, weakref.ref[Overlap]] = weakref.WeakKeyDictionary()


class Engagement(enum.Enum):
    """What an optimizer has to do with its wrapper. What becomes of each update: `partition/update.py`.

    DETACHED    no wrapper reduces its parameters
    OBSERVING   a wrapper does, by a plan that state and parameters are not divided by yet
    READY       state and parameters are divided by the wrapper's plan
    RETIRED     no wrapper ever will again

    DETACHED -> OBSERVING -> READY; a new plan or wrapper: READY -> OBSERVING;
    another optimizer for the wrapper: any -> DETACHED
    """

    DETACHED = enum.auto()
    OBSERVING = enum.auto()
    READY = enum.auto()
    RETIRED = enum.auto()


class Overlap(Listener):
    """One optimizer's engagement with one wrapper.

    `begin_update` is called before the first bucket of an update is stepped, and returns the keywords for the step;
    `end_update` after the last. `has_hooks` says whether `begin_update` runs code of the user's.
    """

    uses_means = True

    def __init__(
        self,
        sharded: ShardedOptimizer,
        stage: int,
        step_in_backward: bool,
        has_hooks: Callable[[], bool],
        begin_update: Callable[[], dict[str, Any]],
        end_update: Callable[[], None],
    ) -> None:
        if sharded.choice.kind is Kind.COUPLED:
            raise ConfigError(
                f"overlap_with_ddp=True is not possible with {type(sharded.optim).__name__}, which evaluates the model "
                "several times per step. Use overlap_with_ddp=False."
            )
        self.sharded = sharded
        self.stage = stage
        self.in_backward = step_in_backward
        self._has_hooks, self._begin_update, self._end_update = has_hooks, begin_update, end_update
        self._arguments: dict[str, Any] = {}
        self.state = Engagement.DETACHED
        self._used = UsedGradients()
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._scatter: ReduceScatter | None = None
        self.gradient_shards: GradientShards | None = None
        for wrapper in known_wrappers():
            if self._wrapper is None:
                self.consider(wrapper)
        listen(self)

    # -- the wrapper ---------------------------------------------------------------------------

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper joined, while it lives."""
        return None if self._wrapper is None else self._wrapper()

    @property
    def reducer(self) -> Reducer:
        """The reducer of the wrapper joined. Raises where there is none."""
        return self.engaged().reducer

    def engaged(self) -> DistributedDataParallel:
        """The wrapper joined. Raises where there is none, or where it works for another optimizer by now."""
        wrapper = self.wrapper
        if wrapper is None:
            raise ConfigError(
                "overlap_with_ddp=True, but no phalanx.DistributedDataParallel wraps the parameters of this optimizer. "
                "Wrap the model, or use overlap_with_ddp=False."
            )
        if _user_of(wrapper.reducer) is not self:
            raise ConfigError(
                "another optimizer has been made with overlap_with_ddp=True for the same wrapper since. "
                "Use that one, or give all parameters to one optimizer."
            )
        return wrapper

    @property
    def scatter(self) -> ReduceScatter | None:
        """The reduction that scatters, if the reducer uses it."""
        return self._scatter if self._scatter is not None and self.scatters else None

    @property
    def scatters(self) -> bool:
        """Whether the reducer leaves each rank its slices only."""
        return self._scatter is not None and self.reducer.strategy is self._scatter

    @property
    def _low_precision(self) -> bool:
        return self.wrapper is not None and self.wrapper.mixed_precision is not None

    def retire(self) -> None:
        """Leave the wrapper for good; its gradients are its own again."""
        wrapper = self.wrapper
        if wrapper is not None and self in wrapper.reducer.listeners:
            self._leave(wrapper.reducer)
        self._wrapper, self.state = None, Engagement.RETIRED

    def _leave(self, reducer: Reducer) -> None:
        """Hear of no more passes. Whoever comes next finds whole means, unless it has them scattered again."""
        reducer.listeners.remove(self)  # first: what follows is not for this one
        if self._scatter is not None and reducer.strategy is self._scatter:
            reducer.use(AllReduce(reducer.collectives))
        self.state = Engagement.DETACHED

    def concerns(self, wrapper: DistributedDataParallel) -> bool:
        """Whether `wrapper` reduces parameters of this optimizer."""
        index_of = self.sharded.table.index_of
        return self.state is not Engagement.RETIRED and any(param in index_of for param in wrapper.reducer.params)

    def consider(self, wrapper: DistributedDataParallel) -> None:
        """Join `wrapper` if it reduces parameters of this optimizer."""
        if not self.concerns(wrapper):
            return
        reducer = wrapper.reducer
        wrapper.follow_moved_parameters()  # a plan of another dtype would be divided by
        check_wrapper(wrapper, self.sharded, self.stage)
        earlier, former = _user_of(reducer), self.wrapper
        if earlier is not None and earlier in reducer.listeners:
            earlier._leave(reducer)  # which is not to keep it alive either
        if former is not None and former is not wrapper:
            self._leave(former.reducer)
            former.reducer.listeners.add(LeftWrapper(partial(_is_in_use, weakref.ref(self))))
        take_over(reducer)
        self._wrapper = weakref.ref(wrapper)
        _latest[reducer] = weakref.ref(self)
        reducer.joined_take_means = True  # of which they own slices
        reducer.listeners.add(self)
        self.state = Engagement.OBSERVING
        self._scatter = None  # that of an earlier wrapper is of its buckets
        if self.sharded.choice.partition == "element" and not self._low_precision:
            self._scatter = ReduceScatter(reducer.collectives, reducer, self.stage, self.in_backward)
            if wrapper._hook is None:
                self._install(wrapper, reducer)

    def _install(self, wrapper: DistributedDataParallel, reducer: Reducer) -> None:
        """Scatter from the next backward on, or if that is to be observed, from the one after it. Every rank is here."""
        assert self._scatter is not None, "there is a reduction to install"
        strategy: Strategy = self._scatter if reducer.settled else AllReduce(reducer.collectives)
        reducer.use(strategy, wider_plan(wrapper) if self.stage == 1 else None)
        if reducer.settled:
            # Not when that backward begins: it moves state, and several wrappers begin at other moments on other ranks.
            self.catch_up()

    # -- the partition -------------------------------------------------------------------------

    def plan_adopted(self) -> None:
        if self.state is Engagement.READY:
            self.state = Engagement.OBSERVING
        wrapper = self.wrapper
        if wrapper is None or self._scatter is None:
            return
        used = wrapper.reducer.strategy
        if used is self._scatter and not wrapper.reducer.settled:
            # As for parameters of another dtype: the next pass is observed, and leads to yet another plan.
            self._install(wrapper, wrapper.reducer)
        if isinstance(used, HookStrategy) and getattr(used.hook, REPLACEABLE, False):
            self._install(wrapper, wrapper.reducer)

    def plan_resumed(self) -> None:
        wrapper = self.wrapper
        if wrapper is None or _user_of(wrapper.reducer) is not self:
            return
        # What the end of the first pass would have done, had there been one: there is none to observe.
        if self._scatter is not None and type(wrapper.reducer.strategy) is AllReduce:
            wrapper.reducer.use(self._scatter)
        self.catch_up()

    def catch_up(self) -> None:
        """Divide by the reducer's plan if it is another one by now. Every rank is here at the same point."""
        if self.state is not Engagement.OBSERVING:
            return
        reducer = self.reducer
        if reducer.collectives.group is not self.sharded.collectives.group:
            raise MismatchError(
                "the wrapper has changed to another process group, and part of the optimizer's state is with ranks of the "
                "old one. Save the state before the change, and load it into an optimizer on the new group."
            )
        sharded = self.sharded
        # The reducer's plan is in the precision of its buckets, which parameters of full precision cannot live in.
        sharded.make_plans = plans_alone if self._low_precision else self._make_plans
        if not self._low_precision and sharded.placement is Placement.OWN:
            sharded.placement = Placement.BUCKET
        if self.gradient_shards is not None and self.scatters:
            self.gradient_shards.set_aside()
        sharded.repartition()
        self.state = Engagement.READY
        self.gradient_shards = None
        if self.scatter is not None and isinstance(sharded.partition, ElementPartition):
            buckets = [bucket for bucket in reducer.buckets if isinstance(bucket, DenseBucket)]
            self.gradient_shards = GradientShards(sharded, sharded.partition.shards_of[0], buckets, self.scatter)
            self.gradient_shards.restore()

    def _make_plans(self, table: ParamTable) -> list[NumberedPlan]:
        # Not bound to the wrapper, which nobody here keeps alive.
        wrapper = self.wrapper
        assert wrapper is not None and wrapper.reducer is self.reducer, "divided for a wrapper that is there"
        return plans_of_wrapper(wrapper, table)

    @contextmanager
    def regrouping(self) -> Iterator[None]:
        """Around a change of the optimizer's groups, which makes its partition anew. Every rank is here."""
        if self.state is not Engagement.READY:
            yield
            return
        if self.gradient_shards is not None and self.scatters:
            self.gradient_shards.set_aside()
        self.gradient_shards, self.state = None, Engagement.OBSERVING
        try:
            yield
        finally:
            self.catch_up()

    # -- a pass --------------------------------------------------------------------------------

    @torch.no_grad()
    def pass_began(self, joined: bool) -> None:
        self.sharded.refuse_torn()
        if self._used.are_there():
            self._refuse_second_use()
        self._used.forget()
        if not self.scatters:
            for param in self.sharded.table.params:
                fill_zeroed(param)  # which an earlier engagement may have left
            return
        if self.reducer.elsewhere is not None:
            raise ReductionError(
                "overlap_with_ddp=True is not possible inside torch.distributed.autograd. Use overlap_with_ddp=False."
            )
        assert self.state is Engagement.READY, "divided when the reduction was installed, or when the plan settled"
        if self.gradient_shards is not None:
            if not joined and self.gradient_shards.has_means:
                self._refuse_second_use()
            self.gradient_shards.begin(joined)

    def pass_failed(self) -> None:
        if self.update.is_under_way:
            # Not told to the others yet: a first note is taken for the cause, and that is what the user gets now.
            self.update.raised()
        elif self.gradient_shards is not None:
            self.gradient_shards.give_up()

    def _refuse_second_use(self) -> None:
        """A backward adds to gradients of the last one. Its update is made, and cannot be joined with this one's."""
        # After a call of `step()`, gradients left there are left on purpose.
        if self.update.state is UNCONFIRMED:
            raise ReductionError(
                "the gradients of the last backward, which made an update, have not been zeroed, nor has step() been called "
                "since: this backward would make another update from their sum. Call zero_grad() before each update's "
                "first backward; accumulate under no_sync(), or make the optimizer with step_in_backward=False."
            )

    @torch.no_grad()
    def bucket_given(self, bucket: Bucket) -> None:
        """The bucket's own slice of the mean is there; or the whole, with another strategy (a user's hook). Step it now."""
        if self.scatters:
            assert self.gradient_shards is not None and isinstance(bucket, DenseBucket), "a scattered bucket has both"
            self.gradient_shards.receive(bucket, self.reducer.under_way.wanted.get(bucket.index))
            if self.in_backward:
                self._update(bucket.index)
            return
        if self._low_precision or not self.reducer.settled:
            return
        self.catch_up()
        partition = self.sharded.partition
        if self.in_backward and isinstance(partition, ElementPartition):
            partition.shards_of[0][bucket.index].take_gradients()
            self._update(bucket.index)

    # -- updates -------------------------------------------------------------------------------

    @property
    def update(self) -> Update:
        """What has become of the latest update."""
        return self.sharded.update

    def _update(self, index: int) -> None:
        """Step one bucket, in the midst of backward, and send it off."""
        partition = self.sharded.partition
        assert isinstance(partition, ElementPartition), "only elements are stepped bucket by bucket"
        if not self.update.is_under_way:
            self._arguments = self._begin_early()
            self.update.begin()
        shard = partition.shards_of[0][index]
        shard.refresh()
        partition.update(shard, self.sharded.local, self._arguments)

    def _begin_early(self) -> dict[str, Any]:
        """An update begins with its first bucket; returns the keywords for the optimizer's step."""
        if not self._has_hooks():
            return self._begin_update()  # looking at every gradient costs several microseconds each
        # Of whole gradients the first bucket's are means by now, and others are still this rank's own, or under way: what a
        # step hook makes of them would be lost, or averaged. Of scattered ones it would find none, or this rank's own.
        params = self.sharded.table.params
        shown = nullcontext() if self.gradient_shards is None or not self.scatters else self.gradient_shards.shown()
        with shown:
            before = [(param.grad, 0 if param.grad is None else param.grad._version) for param in params]
            arguments = self._begin_update()
            for number, (grad, version) in enumerate(before):
                if params[number].grad is not grad or (grad is not None and grad._version != version):
                    raise ReductionError(
                        f"a hook that runs before the step has changed the gradient of {self.sharded.table.names[number]}, "
                        "but backward steps bucket by bucket, before all gradients are there. Make the optimizer with "
                        "step_in_backward=False."
                    )
        return arguments

    @torch.no_grad()
    def pass_ended(self) -> None:
        """The backward has ended everywhere: finish the update, and follow a new plan."""
        try:
            self._finish_pass()
        except BaseException:
            self.update.raised()  # of what listeners raise when a pass has ended, nobody is told that the pass failed
            raise

    def _finish_pass(self) -> None:
        if self.gradient_shards is not None:
            self.gradient_shards.mark_given(self.reducer.buckets)
        if self.update.is_under_way and isinstance(self.sharded.partition, ElementPartition):
            self.sharded.partition.gathering.finish()
            self.update.end()
            if not self.scatters:
                self._forget_gradients()  # whole means, which a user's hook has left
            self._close()
            self.catch_up()
            return
        whole = not self.scatters
        if self._scatter is not None and type(self.reducer.strategy) is AllReduce:
            self.reducer.use(self._scatter)
        self.catch_up()
        if self.gradient_shards is not None and whole:
            self.gradient_shards.absorb()
        if self.in_backward:
            self._step_everything(self._begin_update())
            self._forget_gradients()
            self._close()

    def _close(self) -> None:
        self.update.made_in_backward()
        self._end_update()

    def _forget_gradients(self) -> None:
        """Gradients have been used: free whole ones, or remember that they have been."""
        if self.gradient_shards is not None:
            self.gradient_shards.mark_all()
            return
        for param in self.sharded.table.params:
            if self.stage == 2:
                param.grad = None
            else:
                self._used.note(param)

    @torch.no_grad()
    def step(self, arguments: dict[str, Any]) -> None:
        """Step what backward left scattered, all buckets together (`step_in_backward=False`)."""
        self.engaged()  # where another optimizer has taken over the wrapper, markers stand for that one's slices
        if self.gradient_shards is None:
            self._refuse_unreduced()
        self._step_everything(arguments)

    def _step_everything(self, arguments: dict[str, Any]) -> None:
        partition, gradients = self.sharded.partition, self.gradient_shards
        if gradients is None or gradients.forgets or not isinstance(partition, ElementPartition):
            partition.step(self.sharded.local, None, arguments)
            return
        gradients.arm()
        partition.prepare()
        due = partition.due(self.sharded.local)
        reduced = partition.shards_of[0]  # which have their gradients from the wrapper
        self.sharded.local.begin_update()
        for shard in due:
            shard.refresh()
            if shard not in reduced:
                shard.take_gradients()
            partition.update(shard, self.sharded.local, arguments)
        partition.gathering.finish()
        self.update.end()

    def confirm(self) -> bool:
        """`step()` was called where backward steps: whether it made an update. Raises if that was not what is asked for."""
        self.engaged()
        made = self.update.confirm()
        if made:
            self._refuse_changed()
        else:
            self._refuse_unreduced()
            self._refuse_used()
        return made

    def _refuse_used(self) -> None:
        """Raise if there are gradients that have made an update: any other optimizer would step by them once more."""
        if self._used.are_there() or (self.gradient_shards is not None and self.gradient_shards.has_means):
            raise ReductionError(
                "step() was called a second time for one backward, which made its step by itself. Call it once, or make the "
                "optimizer with step_in_backward=False."
            )

    def _refuse_changed(self) -> None:
        """Raise if gradients are not as they were when backward made an update of them: the change has had no effect."""
        changed = self._used.first_changed()
        if changed is None and self.gradient_shards is not None:
            changed = self.gradient_shards.first_changed()
        if changed is not None:
            number = next(number for number, param in enumerate(self.sharded.table.params) if param is changed)
            raise ReductionError(
                f"the gradient of {self.sharded.table.names[number]} was changed after backward had made the step by "
                "it: too late for this step(). Make the optimizer with step_in_backward=False."
            )

    def _refuse_unreduced(self) -> None:
        """Raise if gradients have been accumulated that no backward has reduced."""
        for number, param in enumerate(self.sharded.table.params):
            grad = param.grad
            waiting = grad.pending is not None if isinstance(grad, ScatteredGradient) else grad is not None
            if waiting and not self._used.is_there(param) and (self.scatters or self.in_backward):
                raise ReductionError(
                    f"step() has nothing to step: {self.sharded.table.names[number]} has a gradient, but no backward has "
                    "reduced it since the last step. Run the last backward of each step outside no_sync()."
                )


def have_been_used(params: Sequence[torch.Tensor]) -> bool:
    """Whether one of these parameters has a gradient that a backward has made an update of."""
    users = [overlap for overlap in map(_user_of, list(_latest)) if overlap is not None]
    return any(overlap._used.is_there(param) for overlap in users for param in params)


def _user_of(reducer: Reducer) -> Overlap | None:
    latest = _latest.get(reducer)
    return None if latest is None else latest()


def _is_in_use(reference: weakref.ref[Overlap]) -> bool:
    overlap = reference()
    return overlap is not None and overlap.state is not Engagement.RETIRED
