"""The lane: carries out the calls of one group one after the other, in the order they were submitted.

A call whose caller waits for it runs in the caller's own thread when nothing is queued before it, which
saves two changes of thread. One submitted to be waited for later runs on the lane's thread, or on that of
the first who waits for it, whoever comes first; the order is the same in any case. Where nobody has anything else to do
before waiting, the thread is not woken (`waits_next`): it would find the work done, and have taken Python's lock for that.

Callbacks of a work's future run in the thread that ran the work, before the next work of the queue. A collective that such a
callback starts runs at once, in the same thread: so it is already over when the callback waits for it, and every rank
runs it at the same place in the order, however late or early the next work was queued (docs/design/shared-memory.md).

The lane owns the group's operations, and so its end. It is shared by the c10d backend and by the direct
path of the reducer.

A caller gets a `dist.Work` (`LaneWork`), safe to be held and asked by C++. C++ sees a future's error only if C++ knows it as
one. `Future.set_exception` in Python stores the exception as the future's *value*, and C++ code that looks for tensors in it
(torch's Reducer does) reads past an empty list and dies. So the future given out is a child, made by `then`: what the
callback of a child raises is an error for C++ and for Python alike, a RuntimeError that holds our words.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, MismatchError
from ..failure.last_words import tell_at_the_end
from ..failure.waiter import quotable
from ..shm.ops.operations import Operations
from ..shm.transport.call import UNSET, Call
from ..untraced import all_untraced

UNLIMITED = timedelta(0)

Tensors = list[torch.Tensor]
# The frame in which Python calls the engine: the caller of whatever C++ calls during backward. Private;
# tests/ddp/test_torch_internals.py notices if it moves.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
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
        # An entry wakes the thread for all that is queued. Not a Semaphore: those are Python, and an interrupt in the midst
        # of `release` leaves one behind that swallows the next, so that the thread would sleep through the group's end.
        self._queued: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # two threads of the program may be the first to need it
        # The thread that runs callbacks of a work it has just carried out; it has the turn.
        self._in_callbacks: int | None = None
        # The thread that is in the midst of a call. Its signal handlers and finalizers run there as well.
        self._amid_in: int | None = None
        self._left_amid = False  # one of them has left the group
        self._closed: CommunicationError | None = None
        self._failed: BaseException | None = None  # the first since somebody asked
        tell_at_the_end(self)

    def submit(
        self, calls: Sequence[Call], blocking: bool = False, timeout: timedelta = UNSET, waits_next: bool = False
    ) -> dist.Work:
        """Carry out `calls`, one after the other, as one work; return when they are over if `blocking`.

        With `waits_next` they may begin only when somebody waits for them, or something else is submitted.
        """
        limit = self._time_limit() if timeout <= UNLIMITED else timeout
        for call in calls:
            call.timeout = limit
        is_inside = self._in_callbacks == threading.get_ident()
        if is_inside or blocking:
            self.refuse_amid(calls[0].verb.name.lower())
        if is_inside:
            return self._run_inside(calls, blocking)
        if not blocking:
            return self._start(calls, waits_next)
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
        try:
            self._amid_in = threading.get_ident()
            for call in calls:
                call.flatten(self.rank, self.world)
                self.operations.run(call)
                call.restore()
        finally:
            self._amid_in = None
            if self._left_amid:
                self._queued.put(None)  # the thread refuses what is queued, and ends
                self._free()

    def refuse_amid(self, what: str) -> None:
        """Raise if a signal handler or a finalizer of this thread waits for `what` in the midst of another call.

        That one goes on when the handler returns, which would wait for it for ever, past any time limit.
        """
        if self._amid_in == threading.get_ident():
            raise CommunicationError(
                f"rank {self.global_rank}: {what} was called by a signal handler, or a finalizer, amid another collective "
                "of the group, which goes on only when that returns. Set a flag in the handler, look at it between steps.",
                (self.global_rank,),
            )

    def remember(self, error: BaseException) -> None:
        """A work that was queued has failed; who holds it is told, and may keep it to himself."""
        if self._failed is None:
            self._failed = error

    def take_failure(self) -> BaseException | None:
        """A copy of the first error of a queued work since the last call, if there was one."""
        failed, self._failed = self._failed, None
        return None if failed is None else _again(failed)

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
        if self._amid_in == threading.get_ident():
            self._left_amid = True  # by a handler of SIGTERM, say: the call that it came into raises, and frees the rest
            return
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
        self._free()

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

    def _free(self) -> None:
        self.operations.close()
        # Whoever still holds the group, and many do, is not to hold its memory.
        del self.operations

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

    def _start(self, calls: Sequence[Call], waits_next: bool = False) -> LaneWork:
        if self._closed is not None:
            raise self._closed
        work = LaneWork(self, calls, not waits_next)
        self._queue.append(work)
        if not waits_next:
            self.wake()
        return work

    def wake(self) -> None:
        """Have the thread carry out what is queued."""
        if self._thread is None:
            self._start_thread()
        self._queued.put(None)

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread is None:
                # A second one would never end: whoever closes the lane wakes and joins one.
                # A daemon, which Python does not join: `lifetime` closes the lane when the user's own threads have ended.
                self._thread = threading.Thread(target=self._serve, name=f"phalanx-lane-{self.global_rank}", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._queued.get()
            while True:
                with self._turn:
                    # Empty if whoever waited for the work was quicker.
                    if not self._queue:
                        break
                    self._perform(self._queue.popleft())
            if self._closed is not None:
                return


# -- what a caller gets ----------------------------------------------------------------------------


def outputs_of(calls: Sequence[Call]) -> Tensors:
    """The tensors that calls fill in, as the caller gave them; asked before any is made flat."""
    return [tensor for call in calls for tensor in (call.outputs if call.results is None else call.results)]


@all_untraced
class LaneWork(dist.Work):
    """Calls queued on a lane, as one work. c10d's C++ code may hold it as well as Python's."""

    def __init__(self, lane: Lane, calls: Sequence[Call], is_announced: bool = True) -> None:
        super().__init__()
        self._lane = lane
        self._is_announced = is_announced  # whether the lane's thread was woken for it
        self._verb = calls[0].verb
        # Let go of when they have run: whoever keeps a work is not to keep its inputs.
        self._calls: Sequence[Call] | None = calls
        self._result = outputs_of(calls)
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        # Completes when the work has run, well or not; `_told` once it has, until `tell`.
        self._source: torch.futures.Future[None] | None = None
        self._told: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Tensors] | None = None  # its child, which is given out

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Block until the result is in place; raise what went wrong."""
        if not self._done.is_set():
            self._lane.refuse_amid(self._verb.name.lower())
            limit = timeout.total_seconds()
            if limit <= 0:
                self._lane.help_until(self)
            # Another thread has the turn, or this one may not take it: it may end before it comes to this work.
            if not self._is_announced and not self._done.is_set():
                self._lane.wake()
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

    def result(self) -> Tensors:
        """The tensors the collective filled in."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Tensors]:
        """The result as a future; made on first asking, as few ask. It fails with a RuntimeError that holds our words."""
        if _wants_tensor_list(self._result):
            self.wait()
            return _tensor_list_future(self._result)
        with self._lock:
            if self._future is None:
                self._source = torch.futures.Future()
                self._future = self._source.then(self._outcome)
                if self._done.is_set():
                    self._source.set_result(None)
            return self._future

    def perform(self, refusal: CommunicationError | None = None) -> None:
        """Run, or be refused; in either case be done. Called by the lane, once."""
        calls, self._calls = self._calls, None
        assert calls is not None, "a lane runs each work once"
        if refusal is not None:
            self._error = refusal
        else:
            try:
                self._lane.run(calls)
            except BaseException as error:
                # Without its traceback, whose frames hold this work: a future may keep the error where no garbage
                # collector sees it, and through the frames it would keep itself, the lane and all their memory.
                self._error = error.with_traceback(None)
                self._lane.remember(self._error)
        # Before anybody hears of it: the flat views in them count as holders of the memory (`BucketMemory.is_held`), and
        # this thread may be kept from going on while the one that waits begins its next backward.
        del calls
        # Together with `get_future`: a future made in between completes there or in `tell`, never in neither.
        with self._lock:
            self._done.set()
            self._told, self._source = self._source, None

    def tell(self) -> None:
        """Complete the future, if one was asked for: its callbacks run in here. Called by the lane after `perform`."""
        told, self._told = self._told, None
        if told is not None:
            told.set_result(None)

    def _outcome(self, _source: object) -> Tensors:
        if self._error is None:
            return self._result
        if isinstance(self._error, CommunicationError):
            raise quotable(self._error)
        if isinstance(self._error, Exception):
            raise _again(self._error)
        # An interrupt is for the thread that it came to; whoever holds the future is told what it ended.
        raise CommunicationError(f"{self._verb.name.lower()}: {self._error!r}")


def _again(error: BaseException) -> BaseException:
    """A copy to raise. What is raised refers to the frames it went through, and these to the work."""
    if isinstance(error, CommunicationError):
        return type(error)(str(error), error.ranks)
    return MismatchError(str(error)) if isinstance(error, MismatchError) else error


@all_untraced
class CompletedWork(dist.Work):
    """A collective that ran in its caller's thread and is over."""

    def __init__(self, result: Tensors) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
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

    def result(self) -> Tensors:
        """The tensors the collective filled in."""
        return self._result

    def get_future(self) -> torch.futures.Future[Tensors]:
        """The result as a future."""
        return _tensor_list_future(self._result)


def _tensor_list_future(tensors: Tensors) -> torch.futures.Future[Any]:
    """A completed future that holds a list of tensors as C++ knows one, not a Python object."""
    # The one function of torch that makes such a future from Python: outside of a trace it calls its argument at once.
    future: torch.futures.Future[Any] = torch.jit.fork(lambda: tensors)
    return future


def _wants_tensor_list(tensors: Tensors) -> bool:
    """Whether the caller is torch's built-in hook FP16_COMPRESS, which takes no other future than c10d's own.

    It is C++ called by the engine, and sends float16. Python cannot make a future of that kind that completes later, so the
    work is finished first: this hook alone runs without overlap.
    """
    if not tensors or tensors[0].dtype is not torch.float16:
        return False
    caller = sys._getframe(1).f_back  # of `get_future`; none in a thread of the engine's own
    return caller is None or caller.f_code is _ENGINE
