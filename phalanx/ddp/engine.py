"""Autograd's engine, as far as the wrapper needs it: which pass runs, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

# The id of the running backward pass, -1 outside. Private, but the only way to tell one pass from another;
# tests/ddp/test_torch_internals.py notices if it moves.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


class BackwardEnd:
    """Queued with the engine: called when the pass has ended, destroyed uncalled if the pass raised.

    Nobody else may hold it, or the second would not be noticed: the engine drops what it did not call before the
    exception reaches the user, who may then zero gradients and go on.
    """

    __slots__ = ("__weakref__", "_ended", "_raised", "_was_called")

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self._ended = ended
        self._raised = raised
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._ended()

    def __del__(self) -> None:
        if not self._was_called:
            self._raised()

    def queue(self) -> None:
        """Have it called at the end of the pass that runs now (a nested one, if it is one)."""
        Variable._execution_engine.queue_callback(self)
