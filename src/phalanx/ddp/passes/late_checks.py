"""What tails say on a device, where reading one would make the host wait for everything that is queued.

On the CPU a tail is read as soon as its bucket is back, before a gradient is given out. On a device the host is far ahead:
it goes on, and a tail is copied to pinned memory behind an event. It is judged at the end of the next backward, or before
anything durable (`DistributedDataParallel.verify`: state_dict, checkpoint, join, leaving). A rank that has reason to doubt
(a parameter that it did not use, a backward inside backward, the first pass of a plan) reads at once, and waits.

What a mismatch costs that is found one step late: the step before was made with gradients that did not belong together. Load
the checkpoint before it. With `on_late_mismatch="poison"` those gradients were NaN (`Tail.soundness`), for all to see.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...comm.collectives import as_real
from ...errors import PhalanxError, ReductionError
from ..messages import nests_elsewhere, out_of_step, unequal

if TYPE_CHECKING:
    from ..buckets.bucket import Bucket
    from ..buckets.tail import Tail
    from ..reducer.reducer import Reducer


@dataclass(frozen=True, slots=True)
class _Pending:
    """A tail on its way to the host. `expected`: what it says if all is well; `digest`: this rank's settings then."""

    event: torch.Event
    copy: torch.Tensor
    expected: torch.Tensor
    digest: int
    tail: Tail
    step: int
    bucket: int
    where: str
    is_weighted: bool


class LateChecks:
    """The tails of a wrapper that have not been judged yet."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        # Pinned memory is slow to get, and small: what was judged serves again.
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def note(self, bucket: Bucket, step: int, where: str, is_weighted: bool) -> None:
        """The bucket is back, as far as the current stream is concerned: have its tail copied."""
        summed, tail = bucket.tail_data, bucket.tail
        free = self._free[summed.numel(), summed.dtype]
        copy = free.pop() if free else torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True, device="cpu")
        copy.copy_(summed, non_blocking=True)
        event = torch.Event(summed.device)
        # By name: without one it would be the stream of the current device, which need not be that of the parameters.
        event.record(torch.accelerator.current_stream(summed.device))
        # As it is now: settings may have changed by the time of the judgement.
        expected = tail.expected(copy, step).clone()
        self._pending.append(
            _Pending(event, copy, expected, tail.digest, tail, step, bucket.index, where, is_weighted)
        )

    def judge(self, reducer: Reducer, before: int | None = None) -> None:
        """Read the tails of all steps `before` that one; of all that there are if it is None. Waits for their copies."""
        while self._pending and (before is None or self._pending[0].step < before):
            pending = self._pending.popleft()
            reducer.collectives.wait_until(pending.event.query, pending.where)
            try:
                self._judge(reducer, pending)
            except PhalanxError as error:
                self._pending.clear()  # the others say the same
                reducer.collectives.board.post_error(error)
                raise
            self._free[pending.copy.numel(), pending.copy.dtype].append(pending.copy)

    def leave(self, reducer: Reducer) -> None:
        """The ranks part: judge what has arrived. What has not may wait for a rank that is gone, and is dropped."""
        arrived = [pending for pending in self._pending if pending.event.query()]
        self._pending.clear()
        for pending in arrived:
            self._judge(reducer, pending)

    def _judge(self, reducer: Reducer, pending: _Pending) -> None:
        if torch.equal(as_real(pending.copy), as_real(pending.expected)):
            return
        void = "; its means were made NaN" if reducer.options.poisons_late else ""
        me = f"{reducer.collectives.me}: step {pending.step} (found later, at step {reducer.step}{void})"
        reading = pending.tail.read(pending.copy, pending.step, pending.digest)
        if not reading.in_step:
            where = f"{me}, bucket {pending.bucket}"
            board = reducer.collectives.board
            raise out_of_step(where, pending.step, reducer.number, reducer.plan.hash, board, pending.bucket)
        if reading.num_given_up:
            raise unequal(me)
        if reading.total_weight != reducer.collectives.world and not pending.is_weighted:
            raise ReductionError(
                f"{me}: other ranks gave a weight and this one did not, so that its mean was not divided by the sum of "
                "weights. On a device, give a weight on every rank: 1 is what ranks without one count."
            )
        if reading.late_buckets:
            raise nests_elsewhere(me)
