"""The reducer: turns gradients that appear one by one into means that leave bucket by bucket.

The way of a gradient: autograd accumulates it and calls the parameter's hook (`hooks`); the hook counts its bucket down; a
full bucket is packed and launched, strictly in plan order; when backward ends, what never filled is launched,
everything is waited for, judged and given out (`passes/backward.py`).

This file begins and ends passes and holds what outlives them. Where gradients go is in `layout`, what a gradient goes
through in `slot`, what a pass goes through in `backward`, what passes have shown and what the plan goes through in
`settling`, which backward is reduced at all in `arming`. Must not know of modules, buffers or process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...comm.failure.folding import users_stacklevel
from ...comm.memory.heap import trim_heap
from ...comm.memory.left_over import drop_left_over
from ...comm.memory.segment import trim_shared
from ...errors import PhalanxError, ReductionError
from ...optim.engine import RunningGraph, current_backward
from ...plan import BucketPlan
from ..buckets import slot
from ..buckets.bucket import Bucket
from ..buckets.dense import DenseBucket
from ..frames import untraced
from ..like_torch.reducer import TorchReducer
from ..messages import not_finished, torn, unused_everywhere
from ..passes import backward as pass_state
from ..passes.arming import Arming, Beginning, Ending, Forward
from ..passes.backward import FAILED, IDLE, MISSED, OBSERVING, REDUCING, Pass, PassState
from ..passes.joined import give_up, take_part
from ..passes.late_checks import LateChecks
from ..passes.listener import Listener, Listeners
from ..passes.order import order_of, take_turns
from ..passes.settling import ChooseBuckets, Learnt, PlanMemory, PlanState, fix, settle
from ..passes.shared import Sharers
from ..passes.streams import GradientStreams
from .hooks import GradientHooks
from .layout import Layout
from .strategy import AllReduce, Strategy

_GRAD_DTYPE, _DTYPE = attrgetter("grad_dtype"), attrgetter("dtype")


@dataclass(slots=True)
class ReducerOptions:
    """What a user may choose about reduction. `on_unused`: "ignore", "warn" or "raise"."""

    as_views: bool = False
    static_graph: bool = False
    on_unused: str = "warn"
    drop_unused: bool = False
    poisons_late: bool = False  # whether means that do not belong together become NaN where nobody reads tails at once


class Reducer(TorchReducer):
    """Reduces the gradients of `params` (registration order) by `plan`, over `collectives`."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        collectives: Collectives,
        options: ReducerOptions,
        number: int = 0,
    ) -> None:
        """`number`: which of several wrappers over the same ranks it is; on all of them the same."""
        self.options = options
        self.number = number
        self.collectives = collectives
        self.order = order_of(collectives.group)
        self.order.enter(self)
        self.strategy: Strategy = AllReduce(collectives)
        self.params = list(params)
        self._every_param = self.params  # also those that are left out once known to be unused
        self.dropped: list[tuple[str, torch.nn.Parameter]] = []  # these, by name: nobody reduces a gradient of theirs
        self.weight: float | None = None  # this rank's share in the mean; None is 1 like everyone's
        self.step = 0
        self.num_rebuilds = 0
        self.listeners = Listeners()
        self.joined_take_means = False  # whether a rank without inputs is given the others' means
        self.learnt = Learnt(len(self.params))
        self.unused_names: list[str] = []  # in the last pass, by all ranks
        # Of compiled models: how their buckets are chosen, and which plan their graphs are cut by.
        self.choose_buckets: ChooseBuckets | None = None
        self.cut_key = plan.hash
        self.late_checks = LateChecks()
        self.streams = GradientStreams()
        # What the wrapper's passes go through, by the functions of `passes/backward.py`; and the pass that is under way or
        # that failed, None in IDLE and MISSED.
        self.state: PassState = IDLE
        self.current: Pass | None = None
        self.backward, self.place = -1, 0  # which backward the last pass was part of, and its place in the launch order
        self.elsewhere: Callable[[Any], AbstractContextManager[None]] | None = None  # see `Forward`
        self._arming = Arming()
        self.sharers = Sharers(self)
        self.hooks = GradientHooks(self)
        self._lay_out(plan, ())
        self._note_kinds()

    # -- setting up ----------------------------------------------------------------------------

    def adopt(self, plan: BucketPlan) -> None:
        """Make `plan` the current one: new memory, counters at their start. Gradients are untouched."""
        self.state, self.current = IDLE, None
        # The old buckets go first, so that the memory of both is never held at once.
        self._lay_out(plan, self.layout.drop())

    def _lay_out(self, plan: BucketPlan, held: Collection[int]) -> None:
        self.layout = Layout(plan, self.params, self.strategy, self.number, self.options.as_views)
        self.layout.choose_large(self.learnt.repeats, self.sharers.params)
        self.layout.hold(held)
        for index, repeats in enumerate(self.learnt.repeats):
            if repeats:
                self.layout.hold_back(index)
        self.hooks.watch_all(self.params, self.layout.on_device)
        self.listeners.tell(Listener.plan_adopted)

    def _note_kinds(self) -> None:
        """A first plan was made for the parameters as they are now. Those that follow it know them by its specs."""
        self._firsts = [bucket.params[0] for bucket in self.buckets]  # parameters of all devices
        self._kinds = self._current_kinds

    @property
    def is_outdated(self) -> bool:
        """Whether the user has given the parameters another dtype or device since the first plan was made."""
        return self._current_kinds != self._kinds

    @property
    def _current_kinds(self) -> tuple[list[torch.dtype | None], list[torch.dtype], list[torch.device]]:
        # What `gradient_dtype` is made of, without a line of Python per parameter: this is asked before each forward.
        params = self._every_param
        return list(map(_GRAD_DTYPE, params)), list(map(_DTYPE, params)), [param.device for param in self._firsts]

    @property
    def plan(self) -> BucketPlan:
        """The plan in force."""
        return self.layout.plan

    @property
    def buckets(self) -> list[Bucket]:
        """Those of the plan in force, in the order in which they leave."""
        return self.layout.buckets

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one made from the observed order."""
        return self.learnt.state is not PlanState.FIRST

    @property
    def is_idle(self) -> bool:
        """Whether no pass is under way, and none is owed."""
        return self.state is IDLE

    def require_idle(self) -> None:
        """Raise unless every backward that began has given out its gradients."""
        if self.state is not IDLE:
            raise not_finished(f"{self.collectives.me}: step {self.step}")

    def keep_params(self, kept: Sequence[int]) -> None:
        """Know only of these parameters from now on, renumbered; a plan for them is adopted next."""
        self.params = [self.params[index] for index in kept]
        self.learnt = self.learnt.restricted(kept)

    def use(self, strategy: Strategy, plan: BucketPlan | None = None) -> None:
        """Reduce by `strategy` from the next backward on, and by another plan if one is given."""
        self.strategy = strategy
        self.adopt(self.plan if plan is None else plan)
        if self.learnt.state is PlanState.FIXED:
            fix(self)

    def move(self, collectives: Collectives, number: int) -> None:
        """Go on over another set of ranks; `restart` comes next."""
        self.late_checks.leave(self)
        self.order.leave(self)
        self.collectives = self.strategy.collectives = collectives
        self.number, self.order = number, order_of(collectives.group)
        self.order.enter(self)

    def restart(self, plan: BucketPlan) -> None:
        """Go on from step 0, with a first plan, as for parameters of another dtype."""
        self.late_checks.judge(self)  # while steps have the numbers that they are judged by
        self.step = 0
        self.params, self.dropped = self._every_param, []
        self.learnt = Learnt(len(self.params))
        self.cut_key = plan.hash
        self.adopt(plan)
        self._note_kinds()

    def resume(self, plan: BucketPlan, memory: PlanMemory) -> None:
        """Go on by the settled plan of an earlier run on as many ranks, as if its passes had been ours. Every rank calls it.

        Where it differs, buckets would be summed, or compressed, otherwise than there until this run has settled.
        """
        self.require_idle()
        self.learnt = Learnt.recalled(memory, len(self.params))
        self.adopt(plan)
        if self.options.static_graph:
            fix(self)
        self.listeners.tell(Listener.plan_resumed)

    @property
    def unreduced(self) -> dict[str, torch.nn.Parameter]:
        """By name, the parameters that have gradient of this rank alone: of backwards inside `no_sync`, or that raised."""
        return {
            spec.name: param
            for spec, param, (bucket, place) in zip(self.plan.specs, self.params, self.layout.places, strict=True)
            if param.grad is not None and bucket.states[place] == slot.HELD
        }

    # -- before backward -----------------------------------------------------------------------

    def forward_begins(self, reduces: bool) -> Forward:
        """A forward runs whose backward is to be reduced, or not."""
        self.recover()
        self.hooks.stay_last()
        if self.step == 1:
            trim_shared()  # of the first plan's buckets, which were in use until its pass had ended
        return self._arming.forward_began(reduces)

    def reached(self, forward: Forward) -> None:
        """A pass of autograd has reached an output of `forward`. Nothing begins by that."""
        with self.order.lock:
            self._arming.note(self, forward)
            if forward.elsewhere is not None and self.state < OBSERVING:
                # Gradients that are left elsewhere call no parameter's hook.
                self.elsewhere = forward.elsewhere
                self.elsewhere = self.elsewhere if self.begin() else None

    def recover(self) -> None:
        """After passes that raised, of this wrapper or of others: bring all ranks to the same point."""
        drop_left_over()
        self.order.recover(self)

    def fail_if_left(self) -> None:
        """No backward runs, here or in another thread: a pass that is under way cannot have ended as it should."""
        if self.state >= OBSERVING and self._arming.noted is None and current_backward() == -1:
            self._fail()

    @property
    def has_failed(self) -> bool:
        """Whether a backward raised that was to be reduced, and other ranks may wait for us."""
        return self.state in (FAILED, MISSED)

    @property
    def is_torn(self) -> bool:
        """Whether a pass has failed of which means have been used, which no rank can take back."""
        return self.state is FAILED and self.under_way.has_used_means

    def awaited(self, graph: RunningGraph | None) -> int | None:
        """The number of the forward whose backward, through `graph`, has not come, if one is to be reduced."""
        trained = {id(param) for param in self.params if param.requires_grad}
        if self.state is not IDLE or not trained:
            return None
        # Not by a parameter that others have too: a backward that has reached an output of theirs is theirs (`shared.py`).
        return self._arming.awaited(graph, trained - self.sharers.params)

    def give_up(self) -> Generator[None]:
        """Take part in what is left of a pass that failed, in parts between which other wrappers do theirs."""
        failed = self.current
        if self.is_torn:
            error = torn(f"{self.collectives.me}: step {self.step}")
            self.collectives.board.post_error(error)  # others may wait for what this rank will never join
            raise error
        self.state, self.current, run = pass_state.give_up(self.state), None, failed
        try:
            if run is None:
                # It may have reached an output and no parameter: other ranks may have met one.
                run = Pass(self, joined=False, may_nest=True)
            yield from give_up(run)
        except BaseException:
            for bucket in self.buckets:
                bucket.release()
            raise
        finally:
            self.step += 1
            self.strategy.pass_lost()  # not before its last bucket: hooks have been called until here
            if failed is None and run is not None:  # of which listeners have heard only that it began
                self.listeners.tell(Listener.pass_failed)

    # -- during backward -----------------------------------------------------------------------

    @property
    def noted(self) -> Ending | None:
        """The end of the backward that runs now, if this wrapper is known to take part in it."""
        return self._arming.noted

    @property
    def has_early_buckets(self) -> bool:
        """Whether a pass is under way that has buckets left to launch before backward ends."""
        return self.state in (OBSERVING, REDUCING) and self.current is not None and self.current.has_early_buckets

    def begin(self) -> Pass | None:
        """A parameter got gradient while no pass was under way: the pass that begins with it, if one does."""
        beginning = self._arming.begin(self)
        if beginning is not Beginning.REDUCED:
            if beginning is Beginning.WENT_AROUND:
                self.listeners.tell(Listener.went_around)
            return None
        # They launch first, and would not be waited for. One that has not begun by now has got no gradient on this rank.
        for other in self.order.before(self) if self.order.has_several else ():
            other.begin_owed()
        self.recover()
        if self.sharers.have_changed():
            self.layout.choose_large(self.learnt.repeats, self.sharers.params)
        return self._begin_pass(joined=False, may_nest=self._arming.may_nest)

    def _begin_pass(self, joined: bool, may_nest: bool) -> Pass:
        self.current = Pass(self, joined, may_nest)
        self.state = pass_state.begin(self.state, self.settled)  # not before: what a listener refuses has not begun
        if self.state is OBSERVING:
            self.learnt.observed.clear()  # of one that failed: gradients counted twice would be waited for twice
        if not joined:
            self._remember_place(self.noted)
        return self.current

    def _remember_place(self, ending: Ending | None) -> None:
        self.backward, self.place = (-1, 0) if ending is None else (ending.backward, ending.number)

    @property
    def under_way(self) -> Pass:
        """The pass that is under way, asked only where one is."""
        assert self.current is not None, "a pass has begun"
        return self.current

    def arrived_again(self, index: int) -> None:
        """More gradient for the same parameter in one pass: from now on its bucket waits for the end of backward."""
        self.under_way.arrived_again()
        if not self.learnt.repeats[index]:
            self.learnt.repeats[index] = 1
            self.layout.hold_back(index)

    def mark_arrived(self, index: int) -> None:
        """A parameter has gradient of this pass, of which no hook has told."""
        bucket, place = self.layout.places[index]
        slot.arrive(bucket.states, place)

    # -- end of backward -----------------------------------------------------------------------

    def backward_raised(self, ending: Ending, accumulates: bool) -> None:
        """Before the user sees the exception; `accumulates`: it was a `backward()` for all leaves."""
        self._arming.raised()
        self._remember_place(ending)
        if self.state in (OBSERVING, REDUCING):
            self._fail()
        elif self.state is IDLE and accumulates and ending.forward.reduces and any(p.requires_grad for p in self.params):
            self.state = pass_state.miss(self.state)
        if self.has_failed or accumulates:  # also of a frozen one, or one in no_sync: those behind it may have a part in it
            self.order.fail_waiting(self, ending.backward)

    def fail_unreached(self, backward: int, number: int) -> None:
        """A backward has raised that may have been one of this wrapper too, had it gone on."""
        self.state, self.backward, self.place = pass_state.miss(self.state), backward, number

    def _fail(self) -> None:
        self.state = pass_state.fail(self.state)
        self.order.keep(self)
        for bucket in self.buckets:
            bucket.abandon()
        self.listeners.tell(Listener.pass_failed)
        for bucket in self.buckets:
            bucket.replace_lost()  # last: listeners may have gradients of their own to give back

    def begin_owed(self) -> None:
        """Begin the pass that no gradient has begun on this rank, if the backward is to be reduced all the same."""
        if self.state < OBSERVING and self._arming.is_owed and any(param.requires_grad for param in self.params):
            self._arming.reduced()
            self.recover()
            self._begin_pass(joined=False, may_nest=True)

    @untraced
    def backward_ended(self) -> None:
        """Runs when the whole backward pass has ended; returns with every gradient averaged."""
        ending = self.noted
        if ending is None:
            return  # done together with another wrapper's
        sharing = self.order.sharing(ending)
        try:
            with torch.no_grad():  # when backward has ended, the mode is the user's again
                take_turns([reducer.end() for reducer in sharing])
        finally:
            for reducer in sharing:
                reducer._arming.ended()

    def end(self) -> Generator[None]:
        """What is left to do when backward has ended, in parts between which other wrappers do theirs."""
        self.begin_owed()
        run = self.current
        if run is None or self.state < OBSERVING:
            # As after torch.autograd.grad, or a backward through a model that is frozen for it.
            self.listeners.tell(Listener.local_backward_ended)
            return
        self.listeners.tell(Listener.backward_ended)
        try:
            with nullcontext() if self.elsewhere is None else self.elsewhere(self):
                self.state = pass_state.flush(self.state)
                run.flush_early_buckets()
                yield
                run.flush_last_bucket()
                if not self.settled:
                    trim_heap()  # the only pass in which all gradients were there at once
                yield
                run.complete()
        except BaseException as error:
            self._fail()
            if isinstance(error, PhalanxError):
                self.collectives.board.post_error(error)
            raise
        finally:
            self.elsewhere = None
        self.learnt.usage.record(self.sharers.leave_out(run.unused_here, self.params))
        self._close(run)

    def join_others(self, weight: float | None) -> None:
        """Take part in the others' pass without gradients of this rank, which counts `weight` in the mean."""
        self.recover()
        before, self.weight = self.weight, weight
        try:
            run = self._begin_pass(joined=True, may_nest=False)
            take_part(run, self.joined_take_means)
        finally:
            self.weight = before
        self._close(run)

    def _close(self, run: Pass) -> None:
        self.state, self.current = pass_state.close(self.state), None
        self.step += 1
        unused = self.sharers.leave_out(run.unused_everywhere, self.params)
        if not self.options.static_graph:  # whose parameters have no hooks of their own: the first pass is all that is known
            self.streams.forget()
        self.unused_names = [self.plan.specs[index].name for index in unused]
        # Who has been frozen since is unused because it was asked for.
        missed = [self.plan.specs[index].name for index in unused if self.params[index].requires_grad]
        num_params, was_settled = len(self.params), self.settled
        if not was_settled:
            for param in self.params:
                self.hooks.is_final(param)  # hooks that users have put on since are known from the first step on
            settle(self, unused)
        self.listeners.tell(Listener.pass_ended)
        self.strategy.pass_over()
        if not was_settled and self.layout.on_device:
            # After the listeners, who may have changed how buckets are reduced: steps from the next one on make nothing.
            for bucket in self.buckets:
                if isinstance(bucket, DenseBucket):
                    bucket.tail.prepare(bucket.device, bucket.tail_dtype)
        self.listeners.tell(Listener.pass_closed)
        self.late_checks.judge(self, before=self.step - 1)
        # Last: it may raise, on ranks with inputs only, when nothing is left that ranks do together.
        if missed and not run.joined and self.options.on_unused != "ignore":
            text = unused_everywhere(f"{self.collectives.me}: step {self.step - 1}", missed, num_params)
            if self.options.on_unused == "raise":
                raise ReductionError(text)
            self.options.on_unused = "ignore"  # one warning is enough
            warnings.warn(text, stacklevel=users_stacklevel())
