"""A future whose work has a second half that still has to be launched from the training thread."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

S = TypeVar("S")


class PendingFuture(torch.futures.Future[torch.Tensor]):
    """Completes by itself once `launch` was called; whoever waits for it launches it first.

    `launch` may be called any number of times. Futures chained with `then` launch it as well, so a
    hook that wraps another and waits inside does not wait for ever.

    For our own reducer only, which is Python: C++ would launch nothing, and would take an error for the value. The hooks
    that return one refuse the buckets of torch's wrapper (`contract.check_own_bucket`).
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._device = device
        self.launch = launch

    def wait(self) -> torch.Tensor:
        self.launch()
        try:
            return super().wait()
        except Exception as error:
            # A copy is raised: through the frames of this one the future would keep itself, and a whole group, for good.
            copied = _without_frames(error)
            error.with_traceback(None)
            raise copied from None

    def set_launched(self) -> None:
        """There is nothing left to launch; let go of whatever would have."""
        self.launch = _launched

    def finish(self, value: torch.Tensor) -> None:
        """Complete with a result."""
        self.set_launched()
        self.set_result(value)

    def fail(self, error: Exception) -> None:
        """Complete with an error, which every `wait` and `value` raises: of the same kind, with the same words."""
        self.set_launched()
        # Kept where no garbage collector sees it, so without the frames it went through, which refer to this future.
        self.set_exception(_without_frames(error))  # type: ignore[arg-type]  # torch annotates it as a result

    def then(self, callback: Callable[[torch.futures.Future[torch.Tensor]], S]) -> torch.futures.Future[S]:
        child = PendingFuture(self.launch, self._device)

        def settle(parent: torch.futures.Future[torch.Tensor]) -> None:
            try:
                child.finish(callback(parent))  # type: ignore[arg-type]
            except Exception as error:
                child.fail(error)

        self.add_done_callback(settle)
        return child  # type: ignore[return-value]


def _without_frames(error: Exception) -> Exception:
    """The same error as if it had never been raised."""
    try:
        return copy.copy(error)
    except Exception:  # a class of the user's own whose constructor takes something else than it gives on
        return error.with_traceback(None)


def _launched() -> None:
    """What there is left to launch of a future that is done; holds on to nothing."""


def launch_pending(future: torch.futures.Future[Any]) -> None:
    """Make sure that `future` can complete without another call of its hook. Costs nothing if it can.

    For whoever waits on a hook's future otherwise than by its `wait`, before the step's last bucket.
    """
    if isinstance(future, PendingFuture):
        future.launch()
