"""What the first reduced backward teaches: the order of gradients, and what a static graph allows.

Must not know of buckets' memory or of launching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.collectives import Collectives
from ..comm.patience import Patience
from ..errors import ReductionError
from ..plan import Bucket
from .bucket import LiveBucket


def agree_on_order(
    order: Sequence[int], num_params: int, collectives: Collectives, patience: Patience
) -> list[int]:
    """Rank 0's order of distinct parameters, on every rank. One small broadcast, once in a reducer's life."""
    device = torch.device("cpu")
    if collectives.group._device_types and device not in collectives.group._device_types:
        device = torch.device("cuda", torch.cuda.current_device())
    message = torch.full((num_params,), -1, dtype=torch.int64, device=device)
    distinct = list(dict.fromkeys(order))
    message[: len(distinct)] = torch.tensor(distinct, dtype=torch.int64, device=device)
    patience.wait(collectives.broadcast(message, 0), "agreeing on the order of gradients")
    return [index for index in message.tolist() if index >= 0]


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
