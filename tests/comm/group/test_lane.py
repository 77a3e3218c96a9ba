"""A lane's works by themselves, without a group."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from phalanx.comm.group.direct import _call
from phalanx.comm.group.lane import Lane, LaneWork
from phalanx.comm.shm.transport.call import Verb
from phalanx.ddp.buckets.dense import references


class _Nothing:
    rank, world, global_rank = 0, 2, 0

    def run(self, call: object) -> None: ...


class _Looks(threading.Event):
    """Counts who holds the memory of a tensor in the moment it is set."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.seen = -1

    def set(self) -> None:
        self.seen = references(self.tensor)
        super().set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_work_that_is_over_holds_no_memory(dtype: torch.dtype) -> None:
    # Else a bucket takes other memory, as if the user had kept a gradient, whenever the lane's thread has to wait for a
    # core before its last line; and after three such times it gives out copies for ever.
    bucket = torch.zeros(1 << 10, dtype=dtype)
    before = references(bucket)
    work = LaneWork(Lane(_Nothing(), lambda: timedelta(seconds=5)), [_call(Verb.ALL_REDUCE, bucket)])  # type: ignore[arg-type]
    done = work._done = _Looks(bucket)
    work.perform()
    assert done.seen == before
