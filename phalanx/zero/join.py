"""Uneven inputs: what a rank that has run out of them does about the others' optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from .optimizer import ZeroRedundancyOptimizer


class ShadowStep(JoinHook):
    """Steps this rank's part whenever the ranks still training step theirs."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        super().__init__()
        self._zero = zero

        self._wrapper = zero.wrapper
        if self._wrapper is not None:
            self._wrapper.reducer.shadow_takes = True

    def main_hook(self) -> None:
        # A forward under no_sync() is followed by no step.
        if self._wrapper is None or self._wrapper.require_forward_param_sync:
            self._zero.shadow_step()
