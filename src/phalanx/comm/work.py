"""A collective under way, as everything above a transport sees it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch


class Work(Protocol):
    """A collective under way. c10d's own works satisfy this as they are."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until the result is in place; raise what went wrong."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, for those who chain on it."""


def started(work: Any, tensor: torch.Tensor) -> Work:
    """What c10d has launched for `tensor`, as `Collectives.wait` may wait for it: on a device without a time limit."""
    launched: Work = work  # c10d's functions return None on ranks outside the group, where none of ours is ever called
    return launched if tensor.device.type == "cpu" else StreamWork(launched)


class StreamWork:
    """A collective on a device. To wait for it orders the current stream after it; the host goes on.

    Without a time limit: NCCL's blocks the host, counts from the launch, and aborts the communicator when it is over. A rank
    that died or stays silent is found out where the host waits for the device at all (`Waiter.wait_until`).
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> Any:
        """Order the current stream after the collective. The limit is not passed on."""
        return self._work.wait()

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, which orders streams when it is waited for."""
        return self._work.get_future()
