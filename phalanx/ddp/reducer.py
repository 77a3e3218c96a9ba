"""The reducer: turns gradients that appear one by one into means that leave bucket by bucket.

The way of a gradient: autograd accumulates it and calls the parameter's hook (`gradient_hooks`); the hook counts its
bucket down; a full bucket is packed and launched, strictly in plan order (`_launch_ready`); when backward
ends, `_end` flushes what never filled, waits, and gives every parameter its mean.

Whether a backward is reduced is decided by the forward it belongs to: the forward's outputs call `begin`.
Must not know of modules, buffers or process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import Variable

from ..comm.collectives import Collectives
from ..comm.memory.heap import trim_heap
from ..errors import PhalanxError, ReductionError
from ..plan import BucketPlan
from .arrivals import Arrivals
from .bucket import LiveBucket, Stage
from .distributed_autograd import gradients_in_place
from .frames import untraced
from .gradient_hooks import GradientHooks, Phase, current_backward, is_final
from .observation import Arrange, agree_on_plan, check_static, restricted, trigger_of
from .reduction import AllReduce, Reduction
from .sparse import pack_nothing, pack_sparse, unpack_sparse
from .tail import Reading, Tail, exact_ranks
from .timeline import Timeline
from .verdicts import nothing_left, out_of_step, too_late, unused_everywhere


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
        self.params = list(params)
        self._every_param = self.params  # also those that are left out once known to be unused
        self.context_id: int | None = None  # of distributed autograd, if the last forward ran in one
        self.weight: float | None = None  # this rank's share in the mean; None is 1 like everyone's
        self.step = 0
        self.num_rebuilds = 0
        self.ready_order: list[int] = []
        self.unused_names: list[str] = []
        self.timeline = Timeline()
        self.on_bucket_reduced: list[Callable[[LiveBucket], None]] = []
        self.on_begun: list[Callable[[], None]] = []
        self.on_flushed: list[Callable[[], None]] = []
        self.on_adopted: list[Callable[[], None]] = []
        self.shadow_takes = False  # whether a rank without inputs is given the others' means
        self.on_reduced: list[Callable[[], None]] = []
        self._hooks = GradientHooks(self)
        self._warned = False
        self.collectives = collectives
        self.reduction: Reduction = AllReduce(collectives)
        self.arrivals = Arrivals(len(self.params))
        self.cut_mark = plan.hash  # where a compiled model is cut: by `arrange`, or after settling by the plan in force
        self.arrange: Arrange | None = None
        self._adopt(plan)

    # -- setting up ----------------------------------------------------------------------------

    def _adopt(self, plan: BucketPlan) -> None:
        """Make `plan` the current one: new memory, counters at their start. Gradients are untouched."""
        self.plan = plan
        # The old memory goes first, so that both are never held at once; gradients are views of it or copies.
        self.buckets, self.bucket_of = [], []
        self.buckets = self._allocate(plan)
        count = len(self.params)
        self.bucket_of = [self.buckets[0]] * count
        self.is_large = bytearray(count)
        for bucket in self.buckets:
            for slot, large in zip(bucket.slots, bucket.large, strict=True):
                self.bucket_of[slot.param] = bucket
                self.is_large[slot.param] = large
        self._unused: list[int] = []
        self._next = 0
        self.phase = Phase.IDLE
        self.armed = False
        self.task = -1
        self._hooks.watch_all(self.params)
        for callback in self.on_adopted:
            callback()

    def _allocate(self, plan: BucketPlan) -> list[LiveBucket]:
        world = self.collectives.world
        num_buckets = len(plan.buckets)
        live = []
        for bucket in plan.buckets:
            rides = self.reduction.tail_rides and (bucket.sparse or world <= exact_ranks(bucket.dtype))
            num_late = num_buckets + 1 if bucket.index == num_buckets - 1 else 0
            scale = self.reduction.transport_scale if rides and not bucket.sparse else 1.0
            tail = Tail(f"{plan.hash}/{bucket.index}", len(bucket.slots), num_late, world, scale)
            live.append(LiveBucket(bucket, plan.specs, self.params, self.reduction.allocate, tail, rides))
            if not self.reduction.lends_early:
                live[-1].take_memory()
        live[-1].is_last = True
        for last in [bucket for bucket in live if not bucket.sparse][-1:]:
            last.is_last_dense = True
        return live

    def detach(self) -> None:
        """Take every hook off the parameters; gradients are then no longer reduced."""
        self._hooks.detach()

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one made from the observed order."""
        return not self.arrivals.observing

    @property
    def hook_name(self) -> str | None:
        """The registered hook, or None where buckets are reduced by all-reduce."""
        return self.reduction.name

    def require_idle(self) -> None:
        """Raise unless every backward that began has given out its gradients."""
        if self.phase is not Phase.IDLE:
            raise ReductionError(
                f"rank {self.collectives.rank}: step {self.step}: Expected to have finished reduction, but a backward "
                "pass has not given out its gradients yet. It raised, or is still running."
            )

    def use(self, reduction: Reduction, plan: BucketPlan | None = None) -> None:
        """Reduce by `reduction` from the next backward on, and by another plan if one is given."""
        self.reduction = reduction
        self._adopt(self.plan if plan is None else plan)
        if self.options.static_graph and self.settled:
            self._fix(self.arrivals.sequence, self.arrivals.first_used)

    def reconnect(self, collectives: Collectives, plan: BucketPlan) -> None:
        """Go on over another set of ranks, from step 0, with a plan that may be replaced once again."""
        self.collectives = collectives
        self.reduction.collectives = self.collectives
        self.step = 0
        self.params = self._every_param
        self.arrivals = Arrivals(len(self.params))
        self._adopt(plan)

    # -- during backward -----------------------------------------------------------------------

    def arm(self, reduce: bool) -> None:
        """A forward has run. If its backward meets a parameter before an output, it is reduced or not."""
        self.armed = reduce

    def check_finished(self) -> None:
        """Called outside backward: a pass that raised midway left buckets in flight; take them back."""
        if self.phase is Phase.REDUCING and current_backward() == -1:
            for bucket in self.buckets:
                if bucket.stage is Stage.LAUNCHED:
                    self.reduction.abandon(bucket, self._where(bucket))
            self._close_pass()

    def begin(self) -> None:
        """A backward that is to be reduced starts. Further calls in the same pass change nothing."""
        if self.phase is Phase.REDUCING:
            return
        self.phase = Phase.REDUCING
        self.armed = False
        self.task = current_backward()
        self._next = 0
        self._open_pass(shadow=False)
        for callback in self.on_begun:
            callback()
        Variable._execution_engine.queue_callback(self._end)

    def _open_pass(self, shadow: bool) -> None:
        self._unused = []
        self.reduction.begin(shadow)
        for bucket in self.buckets:
            bucket.reclaim()
        self.timeline.begin(self.step, self.buckets)

    @torch.no_grad()
    def large_arrived(self, bucket: LiveBucket, index: int, param: torch.Tensor) -> None:
        if not self.arrivals.observing and self.reduction.packs_early and is_final(param):
            scale = self.reduction.pack_scale * (1.0 if self.weight is None else self.weight)
            place = bucket.place_of(index)
            bucket.pack_one(place, scale, self.options.as_views)
            self.reduction.packed(bucket, place)
            if self._lends_early:
                bucket.lend_arrived(place)

    @property
    def _lends_early(self) -> bool:
        return self.reduction.lends_early and not (self.options.as_views or self.arrivals.nested_somewhere)

    def filled(self, bucket: LiveBucket, param: torch.Tensor) -> None:
        self.timeline.filled(bucket.index)
        # Where a nested backward is new, no bucket is safe until the pass has ended.
        if not (self.arrivals.observing or self.arrivals.surprised) and is_final(param):
            self._launch_ready()

    def _launch_ready(self) -> None:
        # Launch by index even when a later bucket fills first: ranks fill buckets in different orders,
        # and launching as filled would add unrelated gradients together. The last bucket waits for the
        # end of backward, because its tail says whether any other one left too early.
        last = len(self.buckets) - 1
        while self._next < last:
            bucket = self.buckets[self._next]
            if bucket.pending or bucket.held:
                return
            self._launch(bucket)

    @torch.no_grad()
    def _launch(self, bucket: LiveBucket) -> None:
        self._make_way(bucket)
        used = self._pack(bucket)
        if self._lends_early:
            bucket.lend_packed(used)
            if self.arrivals.observing:  # the only pass in which all gradients were there at once
                trim_heap()
        self._next = bucket.index + 1
        self._send(bucket)

    def _make_way(self, bucket: LiveBucket) -> None:
        """Give out the bucket that left `lag` before this one, if the reduction has such a limit."""
        lag = self.reduction.lag
        if lag is not None and bucket.index >= lag and self.buckets[bucket.index - lag].stage is not Stage.GIVEN:
            oldest = self.buckets[bucket.index - lag]
            reading = self._finish(oldest)
            if reading is not None:
                self._check_reading(oldest, reading)
            self._give_out(oldest, reading)

    def _send(self, bucket: LiveBucket) -> None:
        bucket.stage = Stage.LAUNCHED
        if bucket.sparse:
            self.reduction.launch_sparse(bucket)
        else:
            self.reduction.launch(bucket)
        self.reduction.launch_tail(bucket)
        self.timeline.launched(bucket)

    def _pack(self, bucket: LiveBucket) -> list[int] | None:
        scale = 1.0 if self.weight is None else self.weight
        used = self.arrivals.usage(bucket)
        if self.arrivals.static_used is not None:
            check_static(bucket, used, self.collectives.rank, self.step)
        if bucket.sparse:
            pack_sparse(bucket, scale * self.reduction.sparse_scale)
        elif used is not None or not bucket.pack(scale * self.reduction.pack_scale, self.options.as_views):
            used = bucket.with_gradient(used)
            bucket.pack_some(scale * self.reduction.pack_scale, self.options.as_views, used)
        bucket.write_tail(self.step, used, self.weight)
        if bucket.is_last and (self.arrivals.late or self.arrivals.surprised):
            bucket.tail.write_late(bucket.tail_data, self.arrivals.late, self.arrivals.surprised)
        return used

    # -- end of backward -----------------------------------------------------------------------

    @untraced
    def _end(self) -> None:
        """Runs when the whole backward pass has ended; returns with every gradient averaged."""
        self.timeline.backward_ended()
        try:
            with gradients_in_place(self):
                self._flush()
                for index in self._finish_all():
                    self._reduce_again(self.buckets[index])
        except PhalanxError as error:
            self.collectives.board.post_error(error)
            raise
        finally:
            self.timeline.end()
            self._close_pass()
        self.step += 1
        self._report_unused()
        if self.arrivals.observing:
            self._settle()
        for callback in self.on_reduced:
            callback()

    def _flush(self) -> None:
        """Launch what is left. By itself, because `_end` must not hold a bucket when it settles on another plan."""
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._settle_sparse()
        for callback in self.on_flushed:
            callback()

    def _settle_sparse(self) -> None:
        for bucket in self.buckets:
            if bucket.sparse and bucket.stage is Stage.LAUNCHED:
                self.reduction.settle_sparse(bucket, self._where(bucket))

    def _finish_all(self) -> tuple[int, ...]:
        """Wait for the buckets and give out their means; returns those that must go again.

        Where nested backwards are known to happen, local gradients are overwritten only after the last
        bucket has said that no other one left too early. Elsewhere nothing is late, so each bucket is given
        out while later ones are under way; a surprise is an error, and the same step run again is not.
        """
        late: tuple[int, ...] = ()
        can_go_again = self.arrivals.nested_somewhere and not self.options.as_views
        if can_go_again and (reading := self._finish(self.buckets[-1])) is not None:
            late = reading.late_buckets
            self._check_late(late)
        for bucket in self.buckets:
            if bucket.stage is Stage.GIVEN:
                continue
            reading = self._finish(bucket)
            if reading is not None:
                self._check_reading(bucket, reading)
            if bucket.index not in late:
                self._give_out(bucket, reading)
        return late

    def _check_late(self, late: Sequence[int]) -> None:
        if late:
            where = f"rank {self.collectives.rank}: step {self.step}"
            self.reduction.check_late(where, [self.buckets[index] for index in late])

    def _reduce_again(self, bucket: LiveBucket) -> None:
        """Reduce anew, on every rank, a bucket that some rank sent before all its gradient was there."""
        bucket.work = bucket.tail_work = bucket.future = None
        self._launch(bucket)
        self._give_out(bucket, self._finish(bucket))

    @torch.no_grad()
    def _finish(self, bucket: LiveBucket) -> Reading | None:
        """Afterwards the body holds the mean; returns a reading unless every rank was healthy."""
        if bucket.stage is Stage.LAUNCHED:
            where = self._where(bucket)
            if bucket.sparse:
                self.reduction.finish_sparse(bucket, where)
            else:
                self.reduction.finish(bucket, where)
            self.reduction.finish_tail(bucket, where)
            bucket.stage = Stage.REDUCED
        if bucket.tail.is_healthy(bucket.tail_data, self.step):
            return None
        return bucket.tail.read(bucket.tail_data, self.step)

    def _where(self, bucket: LiveBucket) -> str:
        return f"step {self.step}, bucket {bucket.index} (first parameter '{bucket.names[0]}')"

    def _check_reading(self, bucket: LiveBucket, reading: Reading) -> None:
        where = f"rank {self.collectives.rank}: step {self.step}, bucket {bucket.index}"
        if not reading.in_step:
            raise out_of_step(where, self.step, self.plan.hash, self.collectives.board, bucket.index)
        can_go_again = self.arrivals.nested_somewhere and not self.options.as_views
        self.arrivals.nested_somewhere |= reading.nested
        if reading.late_buckets and not can_go_again:
            raise too_late(where, [self.buckets[index] for index in reading.late_buckets], self.options.as_views)

    @torch.no_grad()
    def _give_out(self, bucket: LiveBucket, reading: Reading | None) -> None:
        factor = 1.0
        if reading is not None and reading.total_weight != self.collectives.world:
            factor = self.collectives.world / reading.total_weight if reading.total_weight else 0.0
        usage = None if reading is None else reading.usage
        if bucket.sparse:
            unpack_sparse(bucket, factor, usage is None or usage[0] > 0)
        else:
            # Not from buckets whose successors take their memory at once: both would be held.
            bucket.lends = self.reduction.lends_early or not self.arrivals.observing
            self.reduction.give_out(bucket, factor, usage, self.options.as_views)
        bucket.stage = Stage.GIVEN
        if usage is not None:
            self._unused += [slot.param for slot, n in zip(bucket.slots, usage, strict=True) if not n]
        for callback in self.on_bucket_reduced:
            callback(bucket)

    def _close_pass(self) -> None:
        self.phase = Phase.IDLE
        self.arrivals.close()
        for bucket in self.buckets:
            bucket.rearm()

    def _report_unused(self) -> None:
        self.unused_names = [self.plan.specs[index].name for index in self._unused]
        if not self._unused or self._warned or self.options.on_unused == "ignore":
            return
        self._warned = True
        where = f"rank {self.collectives.rank}: step {self.step - 1}"
        text = unused_everywhere(where, self.unused_names, len(self.params))
        if self.options.on_unused == "raise":
            raise ReductionError(text)
        warnings.warn(text, stacklevel=2)

    # -- after the first reduced backward ------------------------------------------------------

    def _settle(self) -> None:
        """Replace the plan by one in the observed order. Every rank is here at the same step."""
        arrivals = self.arrivals
        arrivals.observing = False
        self.ready_order = list(dict.fromkeys(arrivals.sequence))
        agreed = agree_on_plan(self.plan, self.ready_order, self.arrange, self.collectives)
        plan = agreed.plan
        dropped = self._named(self._unused) if self.options.drop_unused else []
        if dropped:
            plan = self._drop(set(self._unused), plan)
        if plan.hash != self.plan.hash:
            self.num_rebuilds += 1
            self._adopt(plan)
        if not agreed.as_arranged:
            self.cut_mark = self.plan.hash
        if self.options.static_graph:
            self._fix(self.arrivals.sequence, self.arrivals.first_used)
        self._hooks.refuse(dropped, "skip_all_reduce_unused_params=True")

    def _drop(self, dropped: set[int], plan: BucketPlan) -> BucketPlan:
        """Leave parameters that no rank uses out of the plan; one that is used after all is an error."""
        kept = [index for index in range(len(self.params)) if index not in dropped]
        if not kept:
            raise nothing_left(f"rank {self.collectives.rank}")
        self.params = [self.params[index] for index in kept]
        self.arrivals = self.arrivals.keep(kept)
        return restricted(plan, kept)

    def _fix(self, fires: Sequence[int], used: bytes) -> None:
        """The graph is static: one hook a bucket is enough, on the gradient that comes last."""
        self.arrivals.static_used = used
        self.detach()
        if any(used):  # else this rank had no input in the first step, and promised nothing by it
            unused = self._named(index for index, flag in enumerate(used) if not flag)
            self._hooks.refuse(unused, "static_graph=True")
        for planned, bucket in zip(self.plan.buckets, self.buckets, strict=True):
            trigger = trigger_of(planned, fires)
            bucket.expected = bucket.pending = 0 if trigger is None else trigger.num_fires
            if trigger is not None:
                self._hooks.watch_last(self.params[trigger.param], bucket.index)

    def _named(self, indices: Iterable[int]) -> list[tuple[str, torch.nn.Parameter]]:
        return [(self.plan.specs[index].name, self.params[index]) for index in indices]

    # -- for a rank that has run out of inputs -------------------------------------------------

    def _send_nothing(self, bucket: LiveBucket, weight: float | None) -> None:
        if bucket.sparse:
            pack_nothing(bucket)
        else:
            bucket.body.zero_()
        bucket.write_tail(self.step, [0] * len(bucket.slots), weight)
        self._send(bucket)

    @torch.no_grad()
    def shadow(self, weight: float | None) -> None:
        """Take part in the others' reduction with nothing to give, and with `shadow_takes` in what they get."""
        self._open_pass(shadow=True)
        for bucket in self.buckets:
            self._make_way(bucket)
            self._send_nothing(bucket, weight)
        self._settle_sparse()
        late = () if (last := self._finish(self.buckets[-1])) is None else last.late_buckets
        self._check_late(late)
        for bucket in self.buckets:
            if bucket.index in late:
                self._finish(bucket)
            else:
                self._shadow_give_out(bucket)
        for index in late:
            bucket = self.buckets[index]
            bucket.work = bucket.tail_work = bucket.future = None
            self._send_nothing(bucket, weight)
            self._shadow_give_out(bucket)
        self.timeline.end()
        self._close_pass()
        self.step += 1
        if self.arrivals.observing:
            self._settle()
        if self.shadow_takes:
            for callback in self.on_reduced:
                callback()

    def _shadow_give_out(self, bucket: LiveBucket) -> None:
        if bucket.stage is Stage.GIVEN:
            return
        reading = self._finish(bucket)
        if reading is not None:
            self._check_reading(bucket, reading)
        if self.shadow_takes:
            self._give_out(bucket, reading)

