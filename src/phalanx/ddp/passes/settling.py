"""The life of the plan, and what the first reduced backward teaches.

    FIRST     made from the order of registration. The pass that it serves is observed: its buckets leave at the end
    SETTLED   made from the order in which gradients came, rank 0's on every rank; replaced with the group, the dtype,
              or by fewer and larger buckets for an optimizer that scatters
    FIXED     settled, and the graph is static by promise: one hook per bucket is enough

Must not know of buckets' memory or of launching.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...comm.collectives import Collectives
from ...errors import ReductionError
from ...plan import Bucket as PlannedBucket
from ...plan import BucketPlan, plan_of, replan
from ..buckets import slot
from ..buckets.bucket import Bucket, Stage
from ..messages import nothing_left

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer

# Buckets for an observed order, as parameter indices: how the compiler says where it has cut the model.
ChooseBuckets = Callable[[BucketPlan, Sequence[int]], list[list[int]]]


class PlanState(enum.Enum):
    FIRST = enum.auto()
    SETTLED = enum.auto()
    FIXED = enum.auto()


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plan of every rank, and whether it is the one that this rank's compiler would have chosen."""

    plan: BucketPlan
    as_chosen: bool


def agree_on_plan(
    plan: BucketPlan,
    order: Sequence[int],
    choose: ChooseBuckets | None,
    collectives: Collectives,
    device: torch.device,
) -> Agreement:
    """Rank 0's order of distinct parameters, and its buckets if it has chosen any, on every rank.

    One small broadcast, once per plan. `device` is one that the group can send from.
    """
    mine = None if choose is None else choose(plan, order)
    # Row 0: parameters in order, -1 for none. Row 1: the bucket of each, -1 where caps alone decide.
    rows = torch.full((2, len(plan.specs)), -1, dtype=torch.int64, device="cpu")
    if mine is None:
        rows[0, : len(order)] = torch.tensor(order, dtype=torch.int64, device="cpu")
    else:
        rows[0] = torch.tensor([param for group in mine for param in group], device="cpu")
        rows[1] = torch.tensor([index for index, group in enumerate(mine) for _ in group], device="cpu")
    message = rows.flatten().to(device)
    collectives.wait(collectives.broadcast(message, 0), "agreeing on the order of gradients")
    params, buckets = message.view(2, -1).tolist()
    if buckets[0] < 0:
        agreed = replan(plan, [index for index in params if index >= 0])
    else:
        groups: list[list[int]] = [[] for _ in range(max(buckets) + 1)]
        for param, bucket in zip(params, buckets, strict=True):
            groups[bucket].append(param)
        agreed = plan_of(plan.specs, groups, plan.caps)
    return Agreement(agreed, mine == [[slot.param for slot in bucket.slots] for bucket in agreed.buckets])


def restricted(plan: BucketPlan, kept: Sequence[int]) -> BucketPlan:
    """The plan of the parameters `kept`, renumbered."""
    renumber = {old: new for new, old in enumerate(kept)}
    groups = [[renumber[slot.param] for slot in b.slots if slot.param in renumber] for b in plan.buckets]
    return plan_of([plan.specs[index] for index in kept], [group for group in groups if group], plan.caps)


class Usage:
    """Which parameters this rank uses: what the first pass used, and whether every other one used the same."""

    def __init__(self) -> None:
        self.first_unused: frozenset[int] | None = None
        self.looks_static = True

    def record(self, unused: Collection[int]) -> None:
        """A pass has ended in which this rank did not use these parameters."""
        if self.first_unused is None:
            self.first_unused = frozenset(unused)
        elif self.looks_static:
            self.looks_static = self.first_unused == frozenset(unused)

    def renumbered(self, kept: Sequence[int]) -> Usage:
        """The same knowledge about a subset of the parameters."""
        rest = Usage()
        unused = self.first_unused or frozenset()
        rest.first_unused = frozenset(new for new, old in enumerate(kept) if old in unused)
        return rest


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """What passes have shown on this rank, as numbers of parameters: enough to go on in another process."""

    observed: list[int]
    unused: list[int] | None
    repeats: list[int]


class Learnt:
    """What passes have shown of a model on this rank, by numbers of parameters, and how far the plan follows it."""

    def __init__(self, num_params: int) -> None:
        self.state = PlanState.FIRST
        self.observed: list[int] = []  # every gradient of the pass that was observed, as they came
        self.usage = Usage()
        self.repeats = bytearray(num_params)  # by parameter, whether it gets gradient several times in a pass

    @classmethod
    def recalled(cls, memory: PlanMemory, num_params: int) -> Learnt:
        """What an earlier run had learnt, whose plan was settled."""
        learnt = cls(num_params)
        learnt.state, learnt.observed = PlanState.SETTLED, list(memory.observed)
        learnt.usage.first_unused = None if memory.unused is None else frozenset(memory.unused)
        learnt.repeats = bytearray(index in memory.repeats for index in range(num_params))
        return learnt

    def restricted(self, kept: Sequence[int]) -> Learnt:
        """The same about some of the parameters, renumbered."""
        renumber = {old: new for new, old in enumerate(kept)}
        rest = Learnt(len(kept))
        rest.state, rest.usage = self.state, self.usage.renumbered(kept)
        rest.observed = [renumber[index] for index in self.observed if index in renumber]
        rest.repeats = bytearray(self.repeats[index] for index in kept)
        return rest

    @property
    def order(self) -> list[int]:
        """The parameters in the order in which they first got gradient."""
        return list(dict.fromkeys(self.observed))

    @property
    def memory(self) -> PlanMemory:
        """What `recalled` needs."""
        unused = None if self.usage.first_unused is None else sorted(self.usage.first_unused)
        return PlanMemory(list(self.observed), unused, [index for index, again in enumerate(self.repeats) if again])


@dataclass(frozen=True, slots=True)
class Trigger:
    """The parameter whose n-th gradient is the last that its bucket gets in a backward."""

    param: int
    num_fires: int


def trigger_of(bucket: PlannedBucket, fires: Sequence[int]) -> Trigger | None:
    """The bucket's trigger, from every gradient of one backward in order; None if none arrived."""
    members = {slot.param for slot in bucket.slots}
    last = next((param for param in reversed(fires) if param in members), None)
    return None if last is None else Trigger(last, sum(param == last for param in fires))


def settle(reducer: Reducer, unused: Sequence[int]) -> None:
    """Replace the first plan by one in the observed order. Every rank is here at the same step.

    `unused` are the parameters that no rank used.
    """
    reducer.learnt.state = PlanState.SETTLED
    device = reducer.params[0].device
    agreed = agree_on_plan(reducer.plan, reducer.learnt.order, reducer.choose_buckets, reducer.collectives, device)
    plan = agreed.plan
    if unused and reducer.options.drop_unused:
        plan = _drop(reducer, set(unused), plan)
    if plan.hash != reducer.plan.hash:
        reducer.num_rebuilds += 1
        reducer.adopt(plan)
    if not agreed.as_chosen:
        reducer.cut_key = reducer.plan.hash
    if reducer.options.static_graph:
        fix(reducer)
    else:
        _refuse_dropped(reducer)


def _drop(reducer: Reducer, dropped: set[int], plan: BucketPlan) -> BucketPlan:
    """Leave parameters that no rank uses out of the plan; one that is used after all is an error."""
    kept = [index for index in range(len(reducer.params)) if index not in dropped]
    if not kept:
        raise nothing_left(reducer.collectives.me)
    reducer.dropped = _named(reducer, sorted(dropped))
    reducer.keep_params(kept)
    return restricted(plan, kept)


def _refuse_dropped(reducer: Reducer) -> None:
    reducer.hooks.refuse(reducer.dropped, "skip_all_reduce_unused_params=True")


def fix(reducer: Reducer) -> None:
    """The graph is static: one hook per bucket is enough, on the gradient that comes last."""
    reducer.learnt.state = PlanState.FIXED
    unused = reducer.learnt.usage.first_unused or frozenset()
    reducer.hooks.detach()
    _refuse_dropped(reducer)
    if len(unused) < len(reducer.params):  # else this rank had no input in the first step, and promised nothing by it
        reducer.hooks.refuse(_named(reducer, sorted(unused)), "static_graph=True")
    trained = {index for index, param in enumerate(reducer.params) if param.requires_grad}
    fires = [index for index in reducer.learnt.observed if index in trained]
    for planned, bucket in zip(reducer.plan.buckets, reducer.buckets, strict=True):
        trigger = trigger_of(planned, fires)
        bucket.expected = bucket.pending = 0 if trigger is None else trigger.num_fires
        if trigger is not None:
            reducer.hooks.watch_last(reducer.params[trigger.param], bucket.index)


def mark_promised(reducer: Reducer, bucket: Bucket) -> None:
    """Of a static graph: every parameter that the first pass used has its gradient by now, as promised."""
    unused = reducer.learnt.usage.first_unused or frozenset()
    for place, (each, param) in enumerate(zip(bucket.slots, bucket.params, strict=True)):
        if each.param in unused or (param.grad is None and id(param) in reducer.sharers.params):
            continue
        if param.grad is None:
            raise _changed_graph(reducer, bucket.specs[place].name)
        slot.arrive(bucket.states, place)


def find_late(reducer: Reducer) -> None:
    """Of a static graph, whose parameters have no hooks of their own: gradient that came after its bucket had left."""
    for bucket in reducer.buckets:
        if bucket.stage is not Stage.FILLING:
            for place, param in enumerate(bucket.params):
                if param.grad is not None and bucket.states[place] in slot.TAKEN_OUT:
                    slot.arrive(bucket.states, place)


def _named(reducer: Reducer, indices: Sequence[int]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(reducer.plan.specs[index].name, reducer.params[index]) for index in indices]


def _changed_graph(reducer: Reducer, name: str) -> ReductionError:
    return ReductionError(
        f"{reducer.collectives.me}: step {reducer.step}: Your training graph has changed in this iteration: "
        f"parameter '{name}' got a gradient in the first step and none now, but static_graph=True promises the same "
        "graph in every step. Remove static_graph=True."
    )
