"""The reducer: turns gradients that appear one by one into means that leave bucket by bucket.

The way of a gradient: autograd accumulates it and calls the parameter's hook (`hooks`); the hook counts its bucket down; a
full bucket is packed and launched, strictly in plan order (`_launch_ready`); when backward ends, `_flush` launches
what never filled, `_complete` waits, judges and gives every parameter its mean.

What a gradient goes through is in `slot`, what a pass goes through in `state`, what the plan goes through in `settling`,
which backward is reduced at all in `arming`. Must not know of modules, buffers or process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ...comm.collectives import Collectives
from ...comm.heap import trim_heap
from ...errors import PhalanxError, ReductionError
from ...plan import Bucket as PlannedBucket
from ...plan import BucketPlan
from ..engine import current_backward
from ..frames import untraced
from ..messages import out_of_step, unused_everywhere
from . import slot
from .arming import Arming, Forward
from .bucket import Bucket, DenseBucket, Stage
from .hooks import GradientHooks, is_final
from .joined import give_up, shadow, unequal
from .late import reduce_late_part
from .listener import Listener
from .settling import ChooseBuckets, PlanState, Usage, find_late, fix, mark_promised, settle
from .shares import Shares, agree_on_shares
from .sparse import SparseBucket
from .state import FAILED, FLUSHING, IDLE, OBSERVING, REDUCING, PassState
from .strategy import AllReduce, Strategy
from .tail import Reading, Tail, exact_ranks


@dataclass(slots=True)
class ReducerOptions:
    """What a user may choose about reduction. `on_unused`: "ignore", "warn" or "raise"."""

    as_views: bool = False
    static_graph: bool = False
    on_unused: str = "warn"
    drop_unused: bool = False


class Reducer:
    """Reduces the gradients of `params` (registration order) by `plan`, over `collectives`."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        collectives: Collectives,
        options: ReducerOptions,
    ) -> None:
        self.options = options
        self.collectives = collectives
        self.strategy: Strategy = AllReduce(collectives)
        self.params = list(params)
        self._every_param = self.params  # also those that are left out once known to be unused
        self.weight: float | None = None  # this rank's share in the mean; None is 1 like everyone's
        self.step = 0
        self.num_rebuilds = 0
        self.listeners: list[Listener] = []
        self.joined_take_means = False  # whether a rank without inputs is given the others' means
        # What passes have shown: the order of gradients, what is used, and which parameters get gradient several times.
        self.plan_state = PlanState.FIRST
        self.observed: list[int] = []
        self.ready_order: list[int] = []
        self.usage = Usage()
        self.unused_names: list[str] = []
        self._repeats = bytearray(len(self.params))
        self._warned = False
        # Of compiled models: how their buckets are chosen, and which plan their graphs are cut by.
        self.choose_buckets: ChooseBuckets | None = None
        self.cut_key = plan.hash
        # Of the pass under way.
        self.state: PassState = IDLE
        self.wanted: dict[int, Sequence[int]] = {}  # by bucket, which parameters any rank used; all where it is missing
        self.late_buckets: tuple[int, ...] = ()
        self.next = 0  # the first bucket that has not been launched
        self.shares = Shares()
        self._unused_here: list[int] = []
        # Whether a backward inside this backward is known or announced: on this rank, and on any rank, by its tails.
        self._nests = self._nests_somewhere = False
        self.elsewhere: Callable[[Any], AbstractContextManager[None]] | None = None  # see `Forward`
        self._arming = Arming()
        self.hooks = GradientHooks(self)
        self.buckets: list[Bucket] = []
        self.places: list[tuple[Bucket, int]] = []  # by parameter, its bucket and its place in it
        self.adopt(plan)

    # -- setting up ----------------------------------------------------------------------------

    def adopt(self, plan: BucketPlan) -> None:
        """Make `plan` the current one: new memory, counters at their start. Gradients are untouched."""
        self.plan = plan
        self.state = IDLE
        held = [index for index, (bucket, place) in enumerate(self.places) if bucket.states[place] == slot.HELD]
        # The old buckets go first, so that the memory of both is never held at once.
        self.buckets, self.places = [], []
        self.buckets = [self.make_bucket(planned, self._tail_of(planned)) for planned in plan.buckets]
        for last in [bucket for bucket in self.buckets if not bucket.sparse][-1:]:
            last.is_last_dense = True
        where = {each.param: (bucket, place) for bucket in self.buckets for place, each in enumerate(bucket.slots)}
        self.places = [where[index] for index in range(len(self.params))]
        self.is_large = bytearray(isinstance(b, DenseBucket) and b.large[place] for b, place in self.places)
        for index in held:
            bucket, place = self.places[index]
            slot.hold(bucket.states, place)
        for index, repeats in enumerate(self._repeats):
            if repeats:
                self._hold_back(self.places[index][0])
        self.hooks.watch_all(self.params)
        for listener in self.listeners:
            listener.plan_adopted()

    def _tail_of(self, planned: PlannedBucket) -> Tail:
        num_late = len(self.plan.buckets) if planned.index == len(self.plan.buckets) - 1 else 0
        scale = self.strategy.transport_scale if self._tail_rides(planned) and not planned.sparse else 1.0
        signature = f"{self.plan.hash}/{planned.index}"
        return Tail(signature, len(planned.slots), num_late, self.collectives.world, scale)

    def _tail_rides(self, planned: PlannedBucket) -> bool:
        exact = planned.sparse or self.collectives.world <= exact_ranks(planned.dtype)
        return self.strategy.tail_rides and exact

    def make_bucket(self, planned: PlannedBucket, tail: Tail, part_of: Bucket | None = None) -> Bucket:
        """A bucket as the plan has it; with `part_of`, one for what came late for that bucket."""
        common = (planned, self.plan.specs, self.params, tail, self._tail_rides(planned), part_of)
        if planned.sparse:
            return SparseBucket(*common)
        allocate = partial(self.strategy.allocate, planned.index) if part_of is None else self.strategy.allocate_late
        return DenseBucket(*common, allocate, self.options.as_views and part_of is None)

    def detach(self) -> None:
        """Take every hook off the parameters; gradients are then no longer reduced."""
        self.hooks.detach()

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one made from the observed order."""
        return self.plan_state is not PlanState.FIRST

    def require_idle(self) -> None:
        """Raise unless every backward that began has given out its gradients."""
        if self.state is not IDLE:
            raise ReductionError(
                f"rank {self.collectives.rank}: step {self.step}: Expected to have finished reduction, but a backward "
                "pass has not given out its gradients yet. It raised, or is still running."
            )

    def keep_params(self, kept: Sequence[int]) -> None:
        """Know only of these parameters from now on, renumbered; a plan for them is adopted next."""
        renumber = {old: new for new, old in enumerate(kept)}
        self.params = [self.params[index] for index in kept]
        self.places = [self.places[index] for index in kept]
        self.observed = [renumber[index] for index in self.observed if index in renumber]
        self.usage = self.usage.renumbered(kept)
        self._repeats = bytearray(self._repeats[index] for index in kept)

    def use(self, strategy: Strategy, plan: BucketPlan | None = None) -> None:
        """Reduce by `strategy` from the next backward on, and by another plan if one is given."""
        self.strategy = strategy
        self.adopt(self.plan if plan is None else plan)
        if self.plan_state is PlanState.FIXED:
            fix(self)

    def restart(self, collectives: Collectives, plan: BucketPlan) -> None:
        """Go on over another set of ranks, or with parameters of another dtype: from step 0, with a first plan."""
        self.collectives = self.strategy.collectives = collectives
        self.step = 0
        self.params = self._every_param
        self.plan_state, self.observed, self.usage = PlanState.FIRST, [], Usage()
        self._repeats = bytearray(len(self.params))
        self.cut_key = plan.hash
        self.adopt(plan)

    # -- before backward -----------------------------------------------------------------------

    def forward_begins(self, reduces: bool) -> Forward:
        """A forward runs whose backward is to be reduced, or not."""
        self._recover()
        return self._arming.forward_began(reduces)

    def reached(self, forward: Forward) -> None:
        """A pass of autograd has reached an output of `forward`. Nothing begins by that."""
        self._arming.note(self, forward)
        if forward.elsewhere is not None and self.state < OBSERVING:
            # Gradients that are left elsewhere call no parameter's hook.
            self.elsewhere = forward.elsewhere
            self.elsewhere = self.elsewhere if self.begin() else None

    def join_others(self, weight: float | None) -> None:
        """Take part in the others' pass without gradients of this rank, which counts `weight` in the mean."""
        self._recover()
        before, self.weight = self.weight, weight
        try:
            self._open(joined=True)
            observed = self.state is OBSERVING
            self.state = FLUSHING
            shadow(self, self.joined_take_means)
        finally:
            self.weight = before
            self.state = IDLE
        self.step += 1
        if observed:
            settle(self, self._unused_everywhere())
        for listener in self.listeners:
            listener.pass_ended()

    def _recover(self) -> None:
        """After a pass that raised: bring all ranks to the same point."""
        if self.state >= OBSERVING and current_backward() == -1:
            self._fail()  # outside of backward, so the pass cannot have ended as it should
        if self.state is FAILED:
            try:
                give_up(self)
            finally:
                self.state = IDLE
                self.step += 1

    # -- during backward -----------------------------------------------------------------------

    def begin(self) -> bool:
        """A parameter got gradient while no pass was under way: whether one begins with it."""
        if not self._arming.begin(self):
            return False
        self._recover()
        self._open(joined=False)
        return True

    def _open(self, joined: bool) -> None:
        self.next = 0
        self.wanted, self.late_buckets, self._unused_here = {}, (), []
        self._nests, self._nests_somewhere = not joined and self._arming.may_nest, False
        for bucket in self.buckets:
            bucket.open()
        for listener in self.listeners:
            listener.pass_began(joined)
        self.shares = agree_on_shares(self.plan, self.weight, self.collectives, self.params[0].device)
        # Last: what a listener refuses has not begun.
        self.state = REDUCING if self.settled else OBSERVING

    def arrived_again(self, index: int, bucket: Bucket) -> None:
        """More gradient for the same parameter in one pass: from now on its bucket waits for the end of backward."""
        self._nests = True
        if not self._repeats[index]:
            self._repeats[index] = 1
            self._hold_back(bucket)

    def _hold_back(self, bucket: Bucket) -> None:
        """Expect one gradient more than will arrive: the bucket is never full before the end of backward."""
        bucket.expected = len(bucket.slots) + 1

    @torch.no_grad()
    def large_arrived(self, index: int, param: torch.Tensor) -> None:
        if self.state is REDUCING and self.strategy.packs_on_arrival and not self._repeats[index] and is_final(param):
            bucket, place = self.places[index]
            cast("DenseBucket", bucket).take_one(place, self.strategy.pack_scale * self.shares.mine)

    def mark_arrived(self, index: int) -> None:
        """A parameter has gradient of this pass, of which no hook has told."""
        bucket, place = self.places[index]
        slot.arrive(bucket.states, place)

    def filled(self, bucket: Bucket, param: torch.Tensor) -> None:
        for listener in self.listeners:
            listener.bucket_full(bucket)
        if self.state is REDUCING and is_final(param):
            self._launch_ready()

    def _launch_ready(self) -> None:
        # Launch by index even when a later bucket fills first: ranks fill buckets in different orders,
        # and launching as filled would add unrelated gradients together. The last bucket waits for the
        # end of backward, because its tail says which other ones left too early.
        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].pending:
            self._take_and_send(self.buckets[self.next])

    @torch.no_grad()
    def _take_and_send(self, bucket: Bucket) -> None:
        self.make_way(bucket)
        if self.plan_state is PlanState.FIXED:
            mark_promised(self, bucket)
        used = self.take(bucket)
        if used is not None:
            self._unused_here += [each.param for each, flag in zip(bucket.slots, used, strict=True) if not flag]
        self.send(bucket, used)

    def take(self, bucket: Bucket) -> list[int] | None:
        """Pack a bucket; returns which of its parameters this rank used, None for all."""
        scale = self.strategy.sparse_scale if bucket.sparse else self.strategy.pack_scale
        return bucket.take(scale * self.shares.mine)

    def send(self, bucket: Bucket, used: Sequence[int] | None) -> None:
        """Launch a packed bucket, with what this rank has to say beside it."""
        bucket.write_tail(self.step, used, self.shares.told)
        if self._nests:
            bucket.tail.write_nested(bucket.tail_data)
        if bucket.index == len(self.buckets) - 1:
            bucket.tail.write_late(bucket.tail_data, [other.index for other in self.buckets if other.is_late])
        self.launch(bucket)

    def launch(self, bucket: Bucket) -> None:
        """Give a packed bucket, tail written, to the transport."""
        bucket.mark_in_flight()
        self.next = max(self.next, bucket.index + 1)
        self.strategy.start(bucket)
        for listener in self.listeners:
            listener.bucket_sent(bucket)

    @torch.no_grad()
    def make_way(self, bucket: Bucket) -> None:
        """Give out the bucket that left `lag` before this one, if the strategy has such a limit."""
        lag = self.strategy.lag
        if lag is not None and bucket.index >= lag:
            oldest = self.buckets[bucket.index - lag]
            self.receive(oldest)
            # On every rank alike, since its tail told all of them.
            if oldest.stage is Stage.REDUCED and not self._keep(oldest):
                self.give(oldest)

    # -- end of backward -----------------------------------------------------------------------

    def backward_raised(self) -> None:
        """Called by the engine before the user sees the exception."""
        if self.state in (OBSERVING, REDUCING):
            self._fail()

    def _fail(self) -> None:
        for bucket in self.buckets:
            bucket.abandon()
        self.state = FAILED
        for listener in self.listeners:
            listener.pass_failed()

    @untraced
    def backward_ended(self) -> None:
        """Runs when the whole backward pass has ended; returns with every gradient averaged."""
        if self.state < OBSERVING:
            if not self._arming.is_owed or not any(param.requires_grad for param in self.params):
                return  # as after torch.autograd.grad, or a backward through a model that is frozen for it
            self._recover()
            self._open(joined=False)
        for listener in self.listeners:
            listener.backward_ended()
        observed = self.state is OBSERVING
        self.state = FLUSHING
        try:
            with nullcontext() if self.elsewhere is None else self.elsewhere(self):
                self._flush()
                self._complete()
        except BaseException as error:
            self._fail()
            if isinstance(error, PhalanxError):
                self.collectives.board.post_error(error)
            raise
        finally:
            self.elsewhere = None
        self._close(observed)

    @torch.no_grad()
    def _flush(self) -> None:
        """Launch what is left."""
        if self.plan_state is PlanState.FIXED:
            find_late(self)
        for bucket in self.buckets[self.next :]:
            self._take_and_send(bucket)
        self.settle_sparse()
        self.usage.record(self._unused_here)
        if not self.settled:
            trim_heap()  # the only pass in which all gradients were there at once

    def settle_sparse(self) -> None:
        for bucket in self.buckets:
            if bucket.stage is Stage.IN_FLIGHT:
                self.strategy.settle(bucket, self.where(bucket))

    @torch.no_grad()
    def _complete(self) -> None:
        """Wait for all buckets, then give out their means: nothing is overwritten before all is known to be right."""
        self.collect()
        for bucket in self.buckets:
            if bucket.stage is not Stage.GIVEN:
                self.give(bucket)

    def collect(self) -> None:
        """Return when all means are there, and whole: with what came late for them on any rank."""
        for bucket in self.buckets:
            self.receive(bucket)
        for bucket in self.buckets:
            self._keep(bucket)
        for index in self.late_buckets:
            reduce_late_part(self, self.buckets[index])

    def _keep(self, bucket: Bucket) -> bool:
        """Whether a bucket that is back must not be given out yet, because gradient may still come late for it."""
        if bucket.stage is not Stage.REDUCED or not (self._nests_somewhere and self.strategy.gives_for_good):
            return False
        self.strategy.keep(cast("DenseBucket", bucket))
        return True

    def receive(self, bucket: Bucket) -> None:
        """Afterwards the bucket is back, with the mean; raises if the ranks did not belong together."""
        if bucket.stage is not Stage.IN_FLIGHT:
            return
        reading = bucket.reading = self.await_reading(bucket)
        bucket.mark_reduced()
        if reading is None:
            return
        if reading.num_given_up:
            raise unequal(self)
        if reading.total_weight != self.collectives.world:
            factor = self.collectives.world / reading.total_weight if reading.total_weight else 0.0
            self.strategy.scale_mean(bucket, factor)
        self.late_buckets = reading.late_buckets or self.late_buckets
        self._nests_somewhere |= reading.nested
        if not all(reading.usage):
            self.wanted[bucket.index] = reading.usage

    def await_reading(self, bucket: Bucket) -> Reading | None:
        """Wait for a bucket in flight; returns what its tail says, None if every rank was healthy."""
        if bucket.stage is not Stage.IN_FLIGHT:
            return bucket.reading
        self.strategy.finish(bucket, self.where(bucket))
        if bucket.tail.is_healthy(bucket.tail_data, self.step):
            return None
        reading = bucket.tail.read(bucket.tail_data, self.step)
        if not reading.in_step:
            where = f"rank {self.collectives.rank}: step {self.step}, bucket {bucket.index}"
            raise out_of_step(where, self.step, self.plan.hash, self.collectives.board, bucket.index)
        return reading

    def where(self, bucket: Bucket) -> str:
        return f"step {self.step}, bucket {bucket.index} (first parameter '{bucket.specs[0].name}')"

    def give(self, bucket: Bucket) -> None:
        """Make the means the gradients, except of parameters that no rank used."""
        self.strategy.give(bucket, self.wanted.get(bucket.index))
        for listener in self.listeners:
            listener.bucket_given(bucket)

    def _close(self, observed: bool) -> None:
        self.state = IDLE
        self.step += 1
        unused = self._unused_everywhere()
        self._report_unused(unused)
        if observed:
            settle(self, unused)
        for listener in self.listeners:
            listener.pass_ended()

    def _unused_everywhere(self) -> list[int]:
        unused = []
        for index, wanted in sorted(self.wanted.items()):
            unused += [each.param for each, ranks in zip(self.buckets[index].slots, wanted, strict=True) if not ranks]
        return unused

    def _report_unused(self, unused: Sequence[int]) -> None:
        self.unused_names = [self.plan.specs[index].name for index in unused]
        if not unused or self._warned or self.options.on_unused == "ignore":
            return
        self._warned = True
        where = f"rank {self.collectives.rank}: step {self.step - 1}"
        text = unused_everywhere(where, self.unused_names, len(self.params))
        if self.options.on_unused == "raise":
            raise ReductionError(text)
        warnings.warn(text, stacklevel=2)
