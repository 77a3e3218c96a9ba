"""Passes in which this rank has nothing to give: it has run out of inputs, or its own backward raised.

Either way it takes part in the collectives of the others with zeros, so that all ranks stay in step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import ReductionError
from .bucket import Bucket, Stage

if TYPE_CHECKING:
    from .reducer import Reducer


@torch.no_grad()
def shadow(reducer: Reducer, takes: bool) -> None:
    """A whole pass without gradients of this rank; with `takes`, it is given the means of the others."""
    if takes:
        # It is to have the others' gradients only. A parameter that nobody uses now must not keep the gradient of this
        # rank's own last backward, and be stepped with it again.
        for param in reducer.params:
            param.grad = None
    for bucket in reducer.buckets:
        reducer.make_way(bucket)
        _send_nothing(reducer, bucket)
    reducer.settle_sparse()
    reducer.collect()
    for bucket in reducer.buckets:
        if bucket.stage is not Stage.GIVEN:
            reducer.give(bucket) if takes else bucket.give([0] * len(bucket.slots))


@torch.no_grad()
def give_up(reducer: Reducer) -> None:
    """Complete the collectives of a pass that raised on this rank, with a mark in what is sent from here.

    Where every rank gave up, training goes on; otherwise every rank raises: some have the mean of a broken pass.
    """
    first = reducer.next
    for bucket in reducer.buckets[first:]:
        bucket.open()
        _send_nothing(reducer, bucket, given_up=True)
    reducer.settle_sparse()
    reading = None
    for bucket in reducer.buckets:
        if bucket.stage is Stage.IN_FLIGHT:
            reading = reducer.await_reading(bucket)
            if bucket.index < first:
                bucket.release()
            else:
                bucket.mark_reduced()
                bucket.give([0] * len(bucket.slots))
    # With nothing left to send, the pass had failed at its very end, which every rank was told of then.
    if first < len(reducer.buckets) and (reading is None or reading.num_given_up != reducer.collectives.world):
        raise unequal(reducer)


def unequal(reducer: Reducer) -> ReductionError:
    """Some ranks' backward raised and others' did not. The last bucket's tail tells all of them."""
    return ReductionError(
        f"rank {reducer.collectives.rank}: step {reducer.step}: the backward of some ranks raised midway, and that of "
        "others did not, so there is no mean of this step. Look for the first error in the ranks' logs. If it is expected, "
        "catch it on every rank, or compute a loss of zero on the ranks concerned."
    )


def _send_nothing(reducer: Reducer, bucket: Bucket, given_up: bool = False) -> None:
    bucket.take_nothing()
    bucket.write_tail(reducer.step, [0] * len(bucket.slots), reducer.shares.told)
    if given_up:
        bucket.tail.write_given_up(bucket.tail_data)
    reducer.launch(bucket)
