"""What a caller gets for a collective on a lane: a `dist.Work`, safe to be held and asked by C++.

C++ sees a future's error only if C++ knows it as one. `Future.set_exception` in Python stores the exception as the
future's *value*, and C++ code that looks for tensors in it (torch's Reducer does) reads past an empty list and dies. So the
future given out is a child, made by `then`: what the callback of a child raises is an error for C++ and for Python alike, a
RuntimeError that holds our words.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, MismatchError
from ..failure.waiter import quotable
from ..shm.ops.call import Call
from ..untraced import all_untraced

if TYPE_CHECKING:
    from .lane import Lane

UNLIMITED = timedelta(0)

Tensors = list[torch.Tensor]
# The frame in which Python calls the engine: the caller of whatever C++ calls during backward. Private;
# tests/ddp/test_torch_internals.py notices if it moves.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def outputs_of(calls: Sequence[Call]) -> Tensors:
    """The tensors that calls fill in, as the caller gave them; asked before any is made flat."""
    return [tensor for call in calls for tensor in (call.outputs if call.results is None else call.results)]


@all_untraced
class LaneWork(dist.Work):
    """Calls queued on a lane, as one work. c10d's C++ code may hold it as well as Python's."""

    def __init__(self, lane: Lane, calls: Sequence[Call]) -> None:
        super().__init__()
        self._lane = lane
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
