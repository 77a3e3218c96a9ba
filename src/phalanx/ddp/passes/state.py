"""The life of a pass: one backward that is reduced.

    IDLE        no backward of ours is under way
    OBSERVING   the first pass of a plan: gradients arrive, their order is noted, nothing leaves
    REDUCING    gradients arrive, full buckets leave
    FLUSHING    autograd is done: the rest leaves, everything is waited for, judged and given out
    FAILED      the backward raised: owners have their gradients back, some buckets may be in flight. The next forward or
                backward sends what is missing, marked as given up, so that all ranks stay in step

    IDLE -> OBSERVING | REDUCING -> FLUSHING -> IDLE; from any but IDLE -> FAILED -> IDLE
"""

from __future__ import annotations

import enum


class PassState(enum.IntEnum):
    # In this order: below OBSERVING a gradient that arrives has to begin a pass first.
    IDLE = 0
    FAILED = 1
    OBSERVING = 2
    REDUCING = 3
    FLUSHING = 4


IDLE, FAILED, OBSERVING, REDUCING, FLUSHING = PassState
