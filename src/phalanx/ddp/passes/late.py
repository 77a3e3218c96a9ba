"""Gradient that came after its bucket had left: averaged as a bucket of its own, and added.

Only a nested backward (reentrant checkpointing) brings gradient to one parameter several times in a pass. Packing took the
first part, so the late part lies in `.grad` alone. The last bucket's tail tells all ranks which buckets are late on any
of them; all of them reduce those once more. mean(first + late) = mean(first) + mean(late): no rank has to keep or resend
anything. From then on the parameter's bucket waits for the end of backward, so that it happens once per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..buckets import slot
from ..buckets.bucket import Bucket, Stage
from ..buckets.slot import ABSENT, LATE, LOCAL
from ..messages import too_late

if TYPE_CHECKING:
    from .flight import Pass


def reduce_late_part(run: Pass, bucket: Bucket) -> None:
    """On every rank: reduce what came late for `bucket`, perhaps on other ranks only, and add it to the mean."""
    reducer = run.reducer
    if bucket.stage is Stage.GIVEN and run.strategy.gives_for_good:
        raise too_late(f"rank {run.collectives.rank}: step {reducer.step}", bucket.index, bucket.specs[0].name)
    part = reducer.make_bucket(reducer.plan.buckets[bucket.index], bucket.tail.of_late_parts(), bucket)
    if bucket.tail.watch is not None:
        part.tail.watch = bucket.tail.watch.of_late_part(part)
    # Every other slot has been taken, so that its `.grad` is None and adds nothing.
    part.states[:] = bytes(LOCAL if state == LATE else ABSENT for state in bucket.states)
    run.send(part, run.take(part))
    run.strategy.settle(part, run.where(bucket))
    wanted = run.wanted.get(bucket.index)
    run.receive(part)
    run.strategy.join_late(bucket, part)
    slot.join_late(bucket.states)
    bucket.stage = Stage.REDUCED
    late = run.wanted.pop(bucket.index, None)
    if wanted is not None and late is not None:
        run.wanted[bucket.index] = _either(wanted, late)


def _either(first: Sequence[int], late: Sequence[int]) -> list[int]:
    return [int(early > 0 or after > 0) for early, after in zip(first, late, strict=True)]
