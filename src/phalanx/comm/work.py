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
