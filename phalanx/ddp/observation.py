"""What the first reduced backward teaches: the order of gradients, and what a static graph allows.

Must not know of buckets' memory or of launching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm.collectives import Collectives
from ..errors import ReductionError
from ..plan import Bucket, BucketPlan, plan_of, replan
from .bucket import LiveBucket

# Buckets for an observed order, as parameter indices: how the compiler says where it has cut the model.
Arrange = Callable[[BucketPlan, Sequence[int]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plan of every rank, and whether it is the one that this rank's `arrange` would have made."""

    plan: BucketPlan
    as_arranged: bool


def agree_on_plan(
    plan: BucketPlan,
    order: Sequence[int],
    arrange: Arrange | None,
    collectives: Collectives,
) -> Agreement:
    """Rank 0's order of distinct parameters, and its buckets if it has arranged any, on every rank.

    One small broadcast, once in a reducer's life.
    """
    mine = None if arrange is None else arrange(plan, order)
    device = torch.device("cpu")
    if collectives.group._device_types and device not in collectives.group._device_types:
        device = torch.device("cuda", torch.cuda.current_device())
    # Row 0: parameters in order, -1 for none. Row 1: the bucket of each, -1 where caps alone decide.
    rows = torch.full((2, len(plan.specs)), -1, dtype=torch.int64)
    if mine is None:
        rows[0, : len(order)] = torch.tensor(order, dtype=torch.int64)
    else:
        rows[0] = torch.tensor([param for group in mine for param in group])
        rows[1] = torch.tensor([index for index, group in enumerate(mine) for _ in group])
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


@dataclass(frozen=True, slots=True)
class Trigger:
    """The parameter whose n-th gradient is the last that its bucket gets in a backward."""

    param: int
    num_fires: int


def trigger_of(bucket: Bucket, fires: Sequence[int]) -> Trigger | None:
    """The bucket's trigger, from every gradient of one backward in order; None if none arrived."""
    members = {slot.param for slot in bucket.slots}
    last = next((param for param in reversed(fires) if param in members), None)
    return None if last is None else Trigger(last, sum(param == last for param in fires))


def check_static(bucket: LiveBucket, used: Sequence[int] | None, rank: int, step: int) -> None:
    """Refuse a graph that is not the one promised: a parameter used before has no gradient now."""
    for i, param in enumerate(bucket.params):
        if param.grad is None and (used is None or used[i]):
            raise ReductionError(
                f"rank {rank}: step {step}: Your training graph has changed in this iteration: parameter "
                f"'{bucket.names[i]}' got a gradient in the first step and none now, but static_graph=True "
                "promises the same graph in every step. Remove static_graph=True."
            )
