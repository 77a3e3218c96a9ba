"""The lane: carries out the calls of one group one after the other, in the order they were submitted.

A call whose caller waits for it runs in the caller's own thread when nothing is queued before it, which
saves two changes of thread. One submitted to be waited for later runs on the lane's thread, or on that of
the first who waits for it, whoever comes first; the order is the same in any case.

Callbacks of a work's future run in the thread that ran the work, before the next work of the queue. A collective that such a
callback starts runs at once, in the same thread: so it is already over when the callback waits for it, and every rank
runs it at the same place in the order, however late or early the next work was queued (docs/design/shared-memory.md).

The lane owns the group's operations, and so its end. It is shared by the c10d backend and by the direct
path of the reducer.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CommunicationError
from ..failure.last_words import tell_at_the_end
from ..shm.ops.call import UNSET, Call
from ..shm.ops.operations import Operations
from .lane_work import UNLIMITED, CompletedWork, LaneWork, outputs_of

# How long a call that is under way takes at most to notice that the group is being left.
_GIVES_UP_S = 10.0


class Lane:
    """One group's lane. The thread is made for the first work that needs it.

    `time_limit` is asked at each submission, so that it may change.
    """

    def __init__(self, operations: Operations, time_limit: Callable[[], timedelta]) -> None:
        self.operations = operations  # until closed
        self.rank = operations.rank
        self.world = operations.world
        self.global_rank = operations.global_rank
        self._time_limit = time_limit
        self._queue: deque[LaneWork] = deque()
        self._turn = threading.Lock()  # held by whoever carries out calls
        # One entry per queued work, to wake the thread. Not a Semaphore: those are Python, and an interrupt in the midst of
        # `release` leaves one behind that swallows the next, so that the thread would sleep through the end of the group.
        self._queued: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # two threads of the program may be the first to need it
        # The thread that runs callbacks of a work it has just carried out; it has the turn.
        self._in_callbacks: int | None = None
        self._closed: CommunicationError | None = None
        tell_at_the_end(self)

    def submit(self, calls: Sequence[Call], blocking: bool = False, timeout: timedelta = UNSET) -> dist.Work:
        """Carry out `calls`, one after the other, as one work; return when they are over if `blocking`."""
        limit = self._time_limit() if timeout <= UNLIMITED else timeout
        for call in calls:
            call.timeout = limit
        if self._in_callbacks == threading.get_ident():
            return self._run_inside(calls, blocking)
        if not blocking:
            return self._start(calls)
        # Not in an inference-mode thread, which would leave tensors behind that others may not write to.
        if not self._queue and not torch.is_inference_mode_enabled() and self._turn.acquire(blocking=False):
            try:
                if self._closed is not None:
                    raise self._closed
                result = outputs_of(calls)
                self.run(calls)
            finally:
                self._turn.release()
            return CompletedWork(result)
        work = self._start(calls)
        work.wait()
        return work

    def run(self, calls: Sequence[Call]) -> None:
        """Carry out `calls` in this thread, which has the turn."""
        for call in calls:
            call.flatten(self.rank, self.world)
            self.operations.run(call)
            call.restore()

    def help_until(self, work: LaneWork) -> None:
        """Run works from the queue, this one included, unless another thread is at it."""
        if self._in_callbacks == threading.get_ident():
            # A callback waits for a work that was queued later. This thread has the turn: nobody else can run it.
            while not work.is_completed() and self._queue:
                self._perform(self._queue.popleft())
            return
        if torch.is_inference_mode_enabled():
            return
        while not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                if not self._queue:
                    return
                self._perform(self._queue.popleft())
            finally:
                self._turn.release()

    def abort(self, reason: str) -> None:
        """Make every collective of the group raise, here and on the other ranks."""
        if self._closed is None:
            self.operations.break_(CommunicationError(reason, (self.global_rank,)))

    def hear_last_words(self, words: str) -> None:
        """This process ends by an exception: tell the other ranks by the links, which need no store."""
        self.abort(f"rank {self.global_rank} failed: {words}")

    def stay_for_others(self) -> None:
        """What was told has arrived: it lies in the sockets of those who listen."""

    def close(self) -> None:
        """Leave the group. What is under way or queued raises."""
        if self._closed is not None:
            return
        reason = self._closed = CommunicationError(
            f"rank {self.global_rank}: the process group was destroyed before the collective had "
            "finished. Wait for every work before destroying the group.",
            (self.global_rank,),
        )
        # In this order: `leave` makes the call under way raise, so that its thread gives up the turn; and nothing
        # may be freed while a thread could still be in a call.
        self.operations.leave(reason)
        # With a limit: an interrupt may have come to a thread between taking the turn and using it, which then has it for
        # ever. It is ours in that case too.
        self._turn.acquire(timeout=_GIVES_UP_S)
        try:
            while self._queue:
                self._perform(self._queue.popleft())
        finally:
            self._turn.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queued.put(None)
            self._thread.join()
        self.operations.close()
        # Whoever still holds the group, and many do, is not to hold its memory.
        del self.operations

    def abandon(self) -> None:
        """Give up the group in a forked child, without a word to the other ranks."""
        if self._closed is not None:
            return
        self._closed = CommunicationError(
            f"a process group of rank {self.global_rank} was used in a forked child. "
            "Make process groups in the child itself, or start it with spawn."
        )
        # The thread is not there in the child, and locks that it held would be held for ever.
        self._queue.clear()
        self._turn, self._starting = threading.Lock(), threading.Lock()
        self._thread = self._in_callbacks = None
        self.operations.abandon()

    def _perform(self, work: LaneWork) -> None:
        """Carry out a work, then run its callbacks. The caller has the turn."""
        work.perform(self._closed)
        # Only now: a signal handler that starts a collective in the midst of `perform` must not run it in there.
        before, self._in_callbacks = self._in_callbacks, threading.get_ident()
        try:
            work.tell()
        finally:
            self._in_callbacks = before

    def _run_inside(self, calls: Sequence[Call], blocking: bool) -> dist.Work:
        """A callback starts a collective: it runs now, since the thread that would run it later is this one."""
        work = LaneWork(self, calls)
        self._perform(work)
        if blocking:
            work.wait()
        return work

    def _start(self, calls: Sequence[Call]) -> LaneWork:
        if self._closed is not None:
            raise self._closed
        work = LaneWork(self, calls)
        self._queue.append(work)
        if self._thread is None:
            self._start_thread()
        self._queued.put(None)
        return work

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread is None:
                # A second one would never end: whoever closes the lane wakes and joins one.
                self._thread = threading.Thread(target=self._serve, name=f"phalanx-lane-{self.global_rank}")
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._queued.get()
            with self._turn:
                # Empty if whoever waited for the work was quicker.
                if self._queue:
                    self._perform(self._queue.popleft())
                elif self._closed is not None:
                    return
