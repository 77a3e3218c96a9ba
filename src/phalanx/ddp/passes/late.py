"""Gradient that came after its bucket had left: averaged as a bucket of its own, and added.

Only a nested backward (reentrant checkpointing) brings gradient to one parameter several times in a pass. Packing took the
first part, so the late part lies in `.grad` alone. The last bucket's tail tells all ranks which buckets are late on any
of them; all of them reduce those once more. mean(first + late) = mean(first) + mean(late): no rank has to keep or resend
anything. From then on the parameter's bucket waits for the end of backward, so that it happens once per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..buckets import slot
from ..buckets.bucket import Bucket, Stage
from ..buckets.slot import LATE
from ..messages import too_late

if TYPE_CHECKING:
    from .backward import Pass


def reduce_late_part(run: Pass, bucket: Bucket) -> None:
    """On every rank: reduce what came late for `bucket`, perhaps on other ranks only, and add it to the mean."""
    reducer = run.reducer
    if bucket.stage is Stage.GIVEN and run.strategy.gives_for_good:
        raise too_late(f"{run.collectives.me}: step {reducer.step}", bucket.index, bucket.specs[0].name)
    part = reducer.layout.late_part_of(bucket)
    if bucket.tail.watch is not None:
        part.tail.watch = bucket.tail.watch.of_late_part(part)
    part.states = slot.states_of_late_part(bucket.states)
    with _only_late(bucket):
        used = run.take(part)
    run.send(part, used)
    run.strategy.settle(part, run.where(bucket))
    wanted = run.wanted.pop(bucket.index, None)  # before the part's own is put there, if it has something to say
    run.receive(part)
    run.strategy.join_late(bucket, part)
    bucket.mark_joined()
    late = run.wanted.pop(bucket.index, None)
    if wanted is not None and late is not None:
        run.wanted[bucket.index] = _either(wanted, late)


@contextmanager
def _only_late(bucket: Bucket) -> Iterator[None]:
    """Inside, slots for which nothing came late have no `.grad`.

    They have been taken, so that they have none anyway, unless another wrapper of the parameter has given it its mean.
    """
    others = [param for param, state in zip(bucket.params, bucket.states, strict=True) if state != LATE]
    apart = [(param, param.grad) for param in others if param.grad is not None]
    for param, _ in apart:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in apart:
            param.grad = grad


def _either(first: Sequence[int], late: Sequence[int]) -> list[int]:
    return [int(early > 0 or after > 0) for early, after in zip(first, late, strict=True)]
