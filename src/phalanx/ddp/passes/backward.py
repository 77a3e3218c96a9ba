"""One backward that is reduced: full buckets leave, come back, are judged and given out.

What a wrapper's passes go through, one after the other (`Reducer.state`), and the only functions that change it:

    state       the pass            what is true                                            next
    IDLE        none                no backward of ours is under way                        begin -> OBSERVING or REDUCING;
                                                                                            miss -> MISSED
    OBSERVING   the plan's first    gradients arrive, their order is noted, nothing leaves  flush -> FLUSHING; fail -> FAILED
    REDUCING    any later one       gradients arrive, full buckets leave                    flush -> FLUSHING; fail -> FAILED
    FLUSHING    the same            autograd is done: the rest leaves, all is waited for,   close -> IDLE; fail -> FAILED
                                    judged and given out
    FAILED      the one that raised owners have their gradients back, some buckets may be   give_up -> IDLE
                                    in flight
    MISSED      none                a backward raised before it had begun a pass, which     give_up -> IDLE
                                    other ranks may have begun

FAILED and MISSED last until the next forward or backward, which sends what is missing, marked as given up, so that all
ranks stay in step. A rank without inputs of its own takes part from REDUCING (or OBSERVING) to `close`, without a flush.
A `Pass` is made by `begin` and dropped by `close`, so that nothing of one pass is left for the next. What each gradient
goes through is in `slot`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ...comm.collectives import Collectives
from ...errors import ReductionError
from ...optim.engine import unrecorded
from ..buckets.bucket import Bucket, Stage
from ..buckets.dense import DenseBucket
from ..buckets.tail import Reading
from ..messages import nests_elsewhere, out_of_step, unequal
from .late import reduce_late_part
from .listener import Listener
from .order import reducers_alive
from .settling import PlanState, find_late, mark_promised

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer

_AS_IT_IS = nullcontext()


class PassState(enum.IntEnum):
    # In this order: below OBSERVING a gradient that arrives has to begin a pass first.
    IDLE = 0
    FAILED = 1
    MISSED = 2
    OBSERVING = 3
    REDUCING = 4
    FLUSHING = 5


IDLE, FAILED, MISSED, OBSERVING, REDUCING, FLUSHING = PassState
UNDER_WAY = (OBSERVING, REDUCING, FLUSHING)


def begin(state: PassState, settled: bool) -> PassState:
    """The first gradient has arrived, and every listener has agreed."""
    return _from(state, (IDLE,), "begin", REDUCING if settled else OBSERVING)


def flush(state: PassState) -> PassState:
    """Autograd is done."""
    return _from(state, (OBSERVING, REDUCING), "flush", FLUSHING)


def close(state: PassState) -> PassState:
    """Every mean has been given out."""
    return _from(state, UNDER_WAY, "close", IDLE)


def fail(state: PassState) -> PassState:
    """The pass raised, in autograd or in what we do."""
    return _from(state, UNDER_WAY, "fail", FAILED)


def miss(state: PassState) -> PassState:
    """A backward raised that was to be reduced, and had not begun a pass."""
    return _from(state, (IDLE,), "miss", MISSED)


def give_up(state: PassState) -> PassState:
    """What other ranks may wait for is about to be sent."""
    return _from(state, (FAILED, MISSED), "give up", IDLE)


def _from(state: PassState, known: Sequence[PassState], event: str, after: PassState) -> PassState:
    assert state in known, f"a wrapper that is {state.name} knows no {event!r} (see ddp/passes/backward.py)"
    return after


# -- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """Each rank's share in the mean: Σ share·gradient / Σ share.

    A rank multiplies its gradients with its weight while it packs them, and the tail adds the weights up, so that the sum
    can be divided when it is back. `mine`: what this rank's gradients are multiplied with. `told`: what its tails say; None
    is 1 like everyone's.
    """

    mine: float | torch.Tensor = 1.0
    told: float | None = None

    @property
    def is_nought(self) -> bool:
        """Whether this rank is known to count nothing. On a device nobody asks."""
        return not isinstance(self.mine, torch.Tensor) and self.mine == 0.0

    def on(self, device: torch.device) -> float | torch.Tensor:
        """`mine` where gradients of this device can be multiplied with it: a model may be on several."""
        mine = self.mine
        return mine.to(device, non_blocking=True) if isinstance(mine, torch.Tensor) else mine

    @classmethod
    def of(cls, weight: float | None) -> Shares:
        """Where large numbers fit, a rank needs to know nobody's weight but its own."""
        return cls(1.0 if weight is None else float(weight), weight)


def agree_on_shares(weight: float | None, collectives: Collectives, device: torch.device) -> Shares:
    """The shares where large numbers may not fit. Every rank calls it at the same point.

    float16, and a hook that may use it, cannot hold a gradient times a number of tokens. There the ranks add up their
    weights first, by a small collective before the first bucket of each pass, and multiply with numbers near one.
    """
    mine = 1.0 if weight is None else float(weight)
    # Filled, not copied: a copy to a device would make the host wait.
    total = torch.full((1,), mine, dtype=torch.float64, device=device)
    collectives.wait(collectives.all_reduce(total), "adding up the weights of the ranks")
    if device.type != "cpu":
        shares = torch.where(total > 0, mine * collectives.world / total, torch.zeros_like(total))
        return Shares(shares[0], None)
    whole = float(total.item())
    return Shares(mine * collectives.world / whole if whole else 0.0, None)


# -- the pass itself -----------------------------------------------------------------------------


class Pass:
    """One backward that is reduced; with `joined`, one of other ranks in which this one takes part without inputs."""

    def __init__(self, reducer: Reducer, joined: bool, may_nest: bool) -> None:
        self.reducer = reducer
        self.buckets = reducer.buckets
        self.strategy = reducer.strategy
        self.collectives = reducer.collectives
        self.joined = joined
        self.next = 0  # the first bucket that has not been launched
        self.late_buckets: tuple[int, ...] = ()  # on any rank, once the last bucket is back
        # By bucket, which parameters any rank used; all where it is missing.
        self.wanted: dict[int, Sequence[int]] = {}
        self.unused_here: list[int] = []
        self._unusual: set[int] = set()  # buckets of which this rank has something to say
        # What the pass has learnt or done so far. Each of these becomes true at most once, apart from the others and from
        # the state of the pass; no two of them make a life cycle.
        self._has_agreed = self._others_gave_up = self._has_given = False
        # Whether a backward inside this backward is known, or announced to a strategy that has to know: on this rank,
        # and on any rank, by their tails.
        self._nests, self._nests_somewhere = may_nest and not joined and self.strategy.gives_for_good, False
        for bucket in self.buckets:
            bucket.open()
        if reducer.options.as_views:
            _leave_moved(self.buckets)
        reducer.listeners.tell(Listener.pass_began, joined)
        self.strategy.pass_begins()
        for bucket in self.buckets:
            bucket.note_gradients()
        narrow = self.strategy.may_narrow or reducer.layout.has_halves
        self._weight = reducer.weight
        self._shares = None if narrow else Shares.of(reducer.weight)

    @property
    def shares(self) -> Shares:
        """Agreed on when the first bucket leaves: where that takes a collective, it has its place among the launches."""
        if self._shares is None:
            self._shares = agree_on_shares(self._weight, self.collectives, self.reducer.params[0].device)
        return self._shares

    def agree(self) -> None:
        """Before the first bucket leaves: what ranks agree on has its place among the launches.

        Not when the pass begins: wrappers that share a backward do so at other moments on other ranks.
        """
        if not self._has_agreed:
            self.reducer.listeners.tell(Listener.launches_begin, self.joined)
            # Buckets may be of one size, so that the first follows the last as any other. A rank that leaves out what comes
            # between two backwards is to be noticed before it sends a bucket to ranks that wait for a few bytes.
            # By number: after a name that all wrappers have in common, the first bucket of any of them would be a known one.
            self.collectives.comes_to(f"a backward of wrapper {self.reducer.number}")
            self._has_agreed = True  # not before: ranks that differ have launched nothing

    # -- during backward -----------------------------------------------------------------------

    def arrived_again(self) -> None:
        """More gradient for the same parameter: only a nested backward brings it."""
        self._nests = True

    @unrecorded
    def large_arrived(self, bucket: DenseBucket, place: int, param: torch.Tensor) -> None:
        """Pack a large gradient while it is in the cache, unless somebody may still change it or add to it."""
        may_pack = self.reducer.state is REDUCING and self.strategy.packs_on_arrival and self._shares is not None
        if may_pack and self.reducer.hooks.is_final(param):
            bucket.take_one(place, self.strategy.pack_scale * self.shares.on(bucket.device))

    def filled(self, bucket: Bucket, param: torch.Tensor) -> None:
        """The last gradient of a bucket has arrived."""
        self.reducer.listeners.tell(Listener.bucket_full, bucket)
        if self.reducer.state is REDUCING and self.reducer.hooks.is_final(param):
            self.launch_ready()

    def launch_ready(self) -> None:
        """Launch what is full, as far as it is this wrapper's turn."""
        order = self.reducer.order
        if order.has_several and any(other.has_early_buckets for other in order.before(self.reducer)):
            return  # they launch ours when theirs have left
        # Launch by index even when a later bucket fills first: ranks fill buckets in different orders,
        # and launching as filled would add unrelated gradients together.
        while self.has_early_buckets and not self.buckets[self.next].pending:
            self._take_and_send(self.buckets[self.next])
        if order.has_several and not self.has_early_buckets:
            following = order.after(self.reducer)
            if following is not None and following.current is not None and following.state is REDUCING:
                following.current.launch_ready()

    @property
    def has_early_buckets(self) -> bool:
        """Whether buckets are left that may leave during backward.

        The last one waits for the end of backward, because its tail says which other ones left too early.
        """
        return self.next < len(self.buckets) - 1

    @unrecorded
    def _take_and_send(self, bucket: Bucket) -> None:
        self.agree()
        self.make_way(bucket)
        if self.reducer.learnt.state is PlanState.FIXED:
            mark_promised(self.reducer, bucket)
        with self._in_order(bucket):
            used = self.take(bucket)
            if used is not None:
                self.unused_here += [slot.param for slot, flag in zip(bucket.slots, used, strict=True) if not flag]
            self.send(bucket, used)

    def _in_order(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Inside, what is done to the bucket is ordered after its gradients, whichever thread does it."""
        if self.reducer.state is REDUCING and self.reducer.layout.on_device:
            return self.reducer.streams.launching(bucket)
        # On the CPU there are no streams; when backward has ended, autograd has joined those of gradients to the caller's.
        return _AS_IT_IS

    def take(self, bucket: Bucket) -> list[int] | None:
        """Pack a bucket; returns which of its parameters this rank used, None for all."""
        scale = self.strategy.sparse_scale if bucket.sparse else self.strategy.pack_scale
        used = bucket.take(scale * self.shares.on(bucket.device))
        if self.shares.is_nought:
            bucket.clear()  # nought times what is not a number would not be nought
        return used

    def send(self, bucket: Bucket, used: Sequence[int] | None, given_up: bool = False) -> None:
        """Launch a packed bucket, with what this rank has to say beside it."""
        tail, out = bucket.tail, bucket.tail_data
        tail.write(out, self.reducer.step)
        if used is not None:
            tail.write_usage(out, used)
        if self.shares.told is not None:
            tail.write_weight(out, self.shares.told)
        if used is not None or given_up:
            self._unusual.add(bucket.index)
        if self._nests:
            tail.write_nested(out)
        if given_up:
            tail.write_given_up(out)
        if bucket.index == len(self.buckets) - 1:
            tail.write_late(out, [other.index for other in self.buckets if other.is_late])
        self.strategy.start(bucket)
        # Not before: a hook that raises has launched nothing, and the bucket is still to be sent.
        bucket.mark_in_flight()
        self.next = max(self.next, bucket.index + 1)
        self.reducer.listeners.tell(Listener.bucket_sent, bucket)

    @unrecorded
    def make_way(self, bucket: Bucket) -> None:
        """Give out the bucket that left `lag` before this one, if the strategy has such a limit."""
        lag = self.strategy.lag
        if lag is not None and bucket.index >= lag:
            oldest = self.buckets[bucket.index - lag]
            with self._in_order(oldest):
                self.receive(oldest)
                # On every rank alike, since its tail told all of them.
                if oldest.stage is Stage.REDUCED and not self._others_gave_up and not self._keep(oldest):
                    self.give(oldest)

    # -- end of backward -----------------------------------------------------------------------

    @unrecorded
    def flush_early_buckets(self) -> None:
        """Autograd is done: launch those that might have left before."""
        if self.reducer.learnt.state is PlanState.FIXED:
            find_late(self.reducer)
        while self.has_early_buckets:
            self._take_and_send(self.buckets[self.next])

    @unrecorded
    def flush_last_bucket(self) -> None:
        """Launch the last one, with which nothing is left to launch."""
        self._take_and_send(self.buckets[-1])
        self.settle_sparse()

    def settle_sparse(self) -> None:
        """Everything is launched: what sparse sums could not say in one collective goes in a second."""
        for bucket in self.buckets:
            if bucket.sparse and bucket.stage is Stage.IN_FLIGHT:
                self.strategy.settle(bucket, self.where(bucket))

    @unrecorded
    def complete(self) -> None:
        """Wait for all buckets, then give out their means: nothing is overwritten before all is known to be right."""
        self.collect()
        self.reducer.sharers.claim(self.reducer, self)
        for bucket in self.buckets:
            if bucket.stage is not Stage.GIVEN:
                self.give(bucket)

    def collect(self) -> None:
        """Return when all means are there, and whole: with what came late for them on any rank."""
        for bucket in self.buckets:
            self.receive(bucket)
        if self._others_gave_up:
            raise self.unequal()
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
            if self._judges_late(bucket):
                self._scale_unread(bucket)
            return
        # Not raised in the midst of backward, which may be about to raise on this rank as well, for the user's own reason.
        self._others_gave_up |= reading.num_given_up > 0
        if reading.total_weight != self.collectives.world:
            factor = self.collectives.world / reading.total_weight if reading.total_weight else 0.0
            self.strategy.scale_mean(bucket, factor)
        self.late_buckets = reading.late_buckets or self.late_buckets
        self._nests_somewhere |= reading.num_nested > 0
        on_device = bucket.tail_data.device.type != "cpu"
        if reading.late_buckets and on_device and reading.num_nested < self.collectives.world:
            raise nests_elsewhere(f"{self.collectives.me}: step {self.reducer.step}")  # others have not looked
        if not all(reading.usage):
            self.wanted[bucket.index] = reading.usage

    def _scale_unread(self, bucket: Bucket) -> None:
        """What the tail says about the mean, without anybody reading it: it is computed and applied on the device."""
        tail, summed, is_weighted = bucket.tail, bucket.tail_data, self.shares.told is not None
        factor = tail.factor(summed) if is_weighted else None
        if self.reducer.options.poisons_late:
            sound = tail.soundness(summed, self.reducer.step, is_weighted)
            factor = sound if factor is None else factor * sound
        if factor is not None:
            self.strategy.scale_mean(bucket, factor)

    def await_reading(self, bucket: Bucket) -> Reading | None:
        """Wait for a bucket in flight; returns what its tail says, None if every rank was healthy, or if nobody asks yet."""
        step = self.reducer.step
        self.strategy.finish(bucket, self.where(bucket))
        if self._judges_late(bucket):
            is_weighted = self.shares.told is not None
            self.reducer.late_checks.note(bucket, step, self.where(bucket), is_weighted)
            return None
        if bucket.tail.is_healthy(bucket.tail_data, step):
            return None
        reading = bucket.tail.read(bucket.tail_data, step)
        if not reading.in_step:
            where = f"{self.collectives.me}: step {step}, bucket {bucket.index}"
            number, plan = self.reducer.number, self.reducer.plan
            raise out_of_step(where, step, number, plan.hash, self.collectives.board, bucket.index)
        return reading

    def _judges_late(self, bucket: Bucket) -> bool:
        """Whether this rank has no reason to wait for what the tail says, which is on a device."""
        if not self.reducer.layout.on_device:
            return False
        if bucket.tail_data.device.type == "cpu" or bucket.sparse or bucket.part_of is not None:
            return False
        if bucket.tail.watch is not None:
            return False  # whoever looks for what is not finite wants to act in this very step
        # The first pass of a plan, ranks without inputs, unused parameters and nested backwards depend on what others say.
        return self.reducer.settled and not self.joined and not self._nests and bucket.index not in self._unusual

    def give(self, bucket: Bucket) -> None:
        """Make the means the gradients, except of parameters that no rank used."""
        self._has_given = True
        if self.reducer.layout.on_device:
            self.reducer.streams.hold(bucket)
        self.strategy.give(bucket, self.wanted.get(bucket.index))
        self.reducer.listeners.tell(Listener.bucket_given, bucket)

    @property
    def has_used_means(self) -> bool:
        """Whether means have been given out that were used at once."""
        return self.strategy.gives_for_good and self._has_given

    # -- in words ------------------------------------------------------------------------------

    def where(self, bucket: Bucket) -> str:
        return f"step {self.reducer.step}, bucket {bucket.index} (first parameter '{bucket.specs[0].name}')"

    def unequal(self) -> ReductionError:
        """Some ranks' backward raised and others' did not."""
        return unequal(f"{self.collectives.me}: step {self.reducer.step}")

    @property
    def unused_everywhere(self) -> list[int]:
        """The parameters that no rank used."""
        found = []
        for index, wanted in sorted(self.wanted.items()):
            found += [slot.param for slot, ranks in zip(self.buckets[index].slots, wanted, strict=True) if not ranks]
        return found


def _leave_moved(buckets: Sequence[Bucket]) -> None:
    """View mode: a bucket in whose memory gradients of other parameters lie, of any wrapper, takes other memory."""
    held = [bucket for bucket in buckets if isinstance(bucket, DenseBucket) and bucket.is_held]
    if held:
        params = [param for reducer in reducers_alive() for param in reducer.params]
        for bucket in held:
            bucket.leave_to(params)
