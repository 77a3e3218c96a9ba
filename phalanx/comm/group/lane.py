"""The lane: runs the collectives of one group one after the other, in the order they were started.

A collective whose caller waits for it runs in the caller's own thread when nothing is queued before
it, which saves two changes of thread. One started to be waited for later runs on the lane's thread,
or on that of the first who waits for it, whoever comes first; the order is the same in any case.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError

_UNLIMITED = timedelta(0)


class LaneWork(dist.Work):
    """A collective queued on a lane. c10d's C++ code may hold it as well as Python's."""

    def __init__(self, lane: Lane, name: str, run: Callable[[], None], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._lane = lane
        self._name = name
        self._run: Callable[[], None] | None = run
        self._result = result
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
            if not self._done.wait(limit if limit > 0 else None):
                raise CollectiveTimeout(f"{self._name} was not finished within {limit:g} s.")
        if self._error is not None:
            raise self._error
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
        run, self._run = self._run, None
        assert run is not None, "a lane runs each work once"
        try:
            if refusal is not None:
                raise refusal
            run()
        except BaseException as error:
            self._error = error
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
            _fail(future, CommunicationError(f"{self._name}: {self._error!r}"))


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


class Lane:
    """One group's lane. The thread is made for the first work that needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[LaneWork] = deque()
        self._turn = threading.Lock()  # held by whoever runs works
        self._queued = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed: CommunicationError | None = None

    def run(self, name: str, run: Callable[[], None], result: list[torch.Tensor]) -> dist.Work:
        """Run a collective and return when it is over."""
        # An inference-mode thread would leave tensors behind that others may not write to.
        if not self._queue and not torch.is_inference_mode_enabled() and self._turn.acquire(blocking=False):
            try:
                if self._closed is not None:
                    raise self._closed
                run()
            finally:
                self._turn.release()
            return CompletedWork(result)
        work = self.start(name, run, result)
        work.wait()
        return work

    def start(self, name: str, run: Callable[[], None], result: list[torch.Tensor]) -> LaneWork:
        """Queue a collective and return at once."""
        if self._closed is not None:
            raise self._closed
        work = LaneWork(self, name, run, result)
        self._queue.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name)
            self._thread.start()
        self._queued.release()
        return work

    def help_until(self, work: LaneWork) -> None:
        """Run works from the queue, this one included, unless somebody else is at it."""
        if torch.is_inference_mode_enabled():
            return
        while not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                if not self._queue:
                    return
                self._queue.popleft().perform(self._closed)
            finally:
                self._turn.release()

    def close(self, reason: CommunicationError) -> None:
        """Refuse what is queued and what is to come. The one under way has to be broken by its engine."""
        self._closed = reason
        with self._turn:
            while self._queue:
                self._queue.popleft().perform(reason)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queued.release()
            self._thread.join()

    def abandon(self, reason: CommunicationError) -> None:
        """Refuse everything, in a forked child: the thread is not there, the locks may be held for ever."""
        self._closed = reason
        self._queue.clear()
        self._turn = threading.Lock()
        self._thread = None

    def _serve(self) -> None:
        while True:
            self._queued.acquire()
            with self._turn:
                if self._queue:
                    self._queue.popleft().perform(self._closed)
                elif self._closed is not None:
                    return
