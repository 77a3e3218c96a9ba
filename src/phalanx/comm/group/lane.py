"""The lane: carries out the calls of one group one after the other, in the order they were submitted.

A call whose caller waits for it runs in the caller's own thread when nothing is queued before it, which
saves two changes of thread. One submitted to be waited for later runs on the lane's thread, or on that of
the first who waits for it, whoever comes first; the order is the same in any case.

The lane owns the group's operations, and so its end. It is shared by the c10d backend and by the direct
path of the reducer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, MismatchError, PhalanxError
from ..failure.last_words import tell_at_the_end
from ..shm.ops.call import UNSET, Call
from ..shm.ops.operations import Operations

_UNLIMITED = timedelta(0)


class LaneWork(dist.Work):
    """Calls queued on a lane, as one work. c10d's C++ code may hold it as well as Python's."""

    def __init__(self, lane: Lane, calls: Sequence[Call]) -> None:
        super().__init__()
        self._lane = lane
        self._verb = calls[0].verb
        # Let go of when they have run: whoever keeps a work is not to keep its inputs.
        self._calls: Sequence[Call] | None = calls
        self._result = _outputs(calls)
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Block until the result is in place; raise what went wrong."""
        if not self._done.is_set():
            limit = timeout.total_seconds()
            if limit <= 0:
                self._lane.help_until(self)
            if not self._done.is_set() and not self._done.wait(limit if limit > 0 else None):
                raise CollectiveTimeout(f"{self._verb.name.lower()} was not finished within {limit:g} s.")
        if self._error is not None:
            raise _again(self._error)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the collective has finished without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as c10d's streams do."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors the collective filled in."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The result as a future; made on first asking, as few ask."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._resolve(self._future)
            return self._future

    def perform(self, refusal: CommunicationError | None = None) -> None:
        """Run, or be refused; in either case be done. Called by the lane, once."""
        calls, self._calls = self._calls, None
        assert calls is not None, "a lane runs each work once"
        try:
            if refusal is not None:
                raise refusal
            self._lane.run(calls)
        except BaseException as error:
            # See `_again`: run by who waits, its frames are those of the waiting.
            self._error = error.with_traceback(None) if isinstance(error, PhalanxError) else error
        # Together with `get_future`: a future made in between is resolved there or here, never by neither.
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._result)
        elif isinstance(self._error, Exception):
            _fail(future, self._error)
        else:
            _fail(future, CommunicationError(f"{self._verb.name.lower()}: {self._error!r}"))


def _again(error: BaseException) -> BaseException:
    """A copy to raise. What is raised refers to the frames it went through, and these to the work: the future, which the
    garbage collector cannot look into, would keep all of it for good."""
    if isinstance(error, CommunicationError):
        return type(error)(str(error), error.ranks)
    return MismatchError(str(error)) if isinstance(error, MismatchError) else error


def _fail(future: torch.futures.Future[list[torch.Tensor]], error: Exception) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a result


class CompletedWork(dist.Work):
    """A collective that ran in its caller's thread and is over."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always: a failure was raised to the caller."""
        return True

    def exception(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def result(self) -> list[torch.Tensor]:
        """The tensors the collective filled in."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The result as a future."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _outputs(calls: Sequence[Call]) -> list[torch.Tensor]:
    """The tensors that calls fill in, as the caller gave them; asked before any is made flat."""
    return [tensor for call in calls for tensor in call.outputs]


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
        self._queued = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed: CommunicationError | None = None
        tell_at_the_end(self)

    def submit(self, calls: Sequence[Call], blocking: bool = False, timeout: timedelta = UNSET) -> dist.Work:
        """Carry out `calls`, one after the other, as one work; return when they are over if `blocking`."""
        limit = self._time_limit() if timeout <= _UNLIMITED else timeout
        for call in calls:
            call.timeout = limit
        if not blocking:
            return self._start(calls)
        # Not in an inference-mode thread, which would leave tensors behind that others may not write to.
        if not self._queue and not torch.is_inference_mode_enabled() and self._turn.acquire(blocking=False):
            try:
                if self._closed is not None:
                    raise self._closed
                result = _outputs(calls)
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
        if torch.is_inference_mode_enabled():
            return
        while not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                if not self._queue:
                    return
                self._queue.popleft().perform(self._closed)
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
        with self._turn:
            while self._queue:
                self._queue.popleft().perform(reason)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queued.release()
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
        self._turn = threading.Lock()
        self._thread = None
        self.operations.abandon()

    def _start(self, calls: Sequence[Call]) -> LaneWork:
        if self._closed is not None:
            raise self._closed
        work = LaneWork(self, calls)
        self._queue.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"phalanx-lane-{self.global_rank}")
            self._thread.start()
        self._queued.release()
        return work

    def _serve(self) -> None:
        while True:
            self._queued.acquire()
            with self._turn:
                # Empty if whoever waited for the work was quicker.
                if self._queue:
                    self._queue.popleft().perform(self._closed)
                elif self._closed is not None:
                    return
