"""A wrapper that its optimizer has left for one that was made later.

A backward through it would be reduced, and stepped by nobody: the program would train on without learning. So it is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ddp.reducer import Listener, Reducer
from ...errors import ReductionError


class LeftWrapper(Listener):
    """Refuses every pass for as long as the optimizer that left is in use.

    When it has ended, on every rank alike: where it begins, what raises would raise again when ranks recover from it.
    """

    def __init__(self, is_in_use: Callable[[], bool]) -> None:
        self._is_in_use = is_in_use

    def pass_ended(self) -> None:
        if self._is_in_use():
            raise ReductionError(
                "this wrapper was left by its ZeroRedundancyOptimizer(overlap_with_ddp=True), which works for the latest "
                "wrapper of its parameters, and another one has been made since: nobody would step by this backward. Train "
                "with the latest, wrap the model once, or use overlap_with_ddp=False."
            )


def take_over(reducer: Reducer) -> None:
    """An optimizer works for this reducer's wrapper from now on, whoever has left it before."""
    for listener in reducer.listeners:
        if isinstance(listener, LeftWrapper):
            reducer.listeners.remove(listener)
