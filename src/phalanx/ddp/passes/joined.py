"""Passes in which this rank has nothing to give: it has run out of inputs, or its own backward raised.

Either way it takes part in the collectives of the others with zeros, so that all ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from ...plan.params import gradient_dtype
from ..buckets import slot
from ..buckets.bucket import Bucket, Stage

if TYPE_CHECKING:
    from .backward import Pass


@torch.no_grad()
def take_part(run: Pass, takes: bool) -> None:
    """A whole pass without gradients of this rank; with `takes`, it is given the means of the others."""
    if takes:
        # It is to have the others' gradients only. A parameter that nobody uses now must not keep the gradient of this
        # rank's own last backward, and be stepped with it again.
        for param in run.reducer.params:
            param.grad = None
    for bucket in run.buckets:
        run.make_way(bucket)
        _send_nothing(run, bucket)
    run.settle_sparse()
    run.collect()
    for bucket in run.buckets:
        if bucket.stage is not Stage.GIVEN:
            run.give(bucket) if takes else bucket.give([0] * len(bucket.slots))


@torch.no_grad()
def give_up(run: Pass) -> Generator[None]:
    """Complete the collectives of a pass that raised on this rank, with a mark in what is sent from here.

    In parts, as a pass that goes well, so that several wrappers launch in the same order on all ranks.
    Where every rank gave up, training goes on; otherwise every rank raises: some have the mean of a broken pass.
    """
    first = run.next
    for bucket in run.buckets[first:]:
        if bucket is run.buckets[-1]:
            yield
        bucket.open()
        _send_nothing(run, bucket, given_up=True)
    run.settle_sparse()
    yield
    reading = None
    for bucket in run.buckets:
        if bucket.stage is Stage.IN_FLIGHT:
            reading = run.await_reading(bucket)
            if bucket.index < first:
                bucket.release()
            else:
                bucket.mark_reduced()
                bucket.give([0] * len(bucket.slots))
                bucket.hold_again()
    # With nothing left to send, the pass had failed at its very end, which every rank was told of then.
    if first == len(run.buckets):
        return
    if reading is None or reading.num_given_up != run.collectives.world:
        raise run.unequal()
    _fill_in(run)


def _fill_in(run: Pass) -> None:
    """Every rank gave up: who has no gradient where another rank has one gets zeros.

    Ranks came to different places before they raised. Zeroed in place, what had come is a gradient on some ranks only, and
    these alone would step the parameter, by its decay and momentum.
    """
    params, device = run.reducer.params, run.reducer.params[0].device
    here = torch.tensor([param.grad is not None for param in params], dtype=torch.float32, device=device)
    run.collectives.wait(run.collectives.all_reduce(here), "comparing what a backward that raised has left")
    for index, num_ranks in enumerate(here.tolist()):
        bucket, place = run.reducer.layout.places[index]
        param = params[index]
        if num_ranks and param.grad is None and param.requires_grad and not bucket.sparse:
            param.grad = torch.zeros_like(param, dtype=gradient_dtype(param), requires_grad=False)
            slot.hold(bucket.states, place)


def _send_nothing(run: Pass, bucket: Bucket, given_up: bool = False) -> None:
    run.agree()
    bucket.take_nothing()
    run.send(bucket, [0] * len(bucket.slots), given_up)
