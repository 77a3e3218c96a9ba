"""Uneven inputs: what a rank that has run out of them does about the others' optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from ..ddp.module import DistributedDataParallel


class JoinedStep(JoinHook):
    """Calls `step`, which steps this rank's part, whenever the ranks still training step theirs."""

    def __init__(self, step: Callable[[], None], wrapper: DistributedDataParallel | None) -> None:
        super().__init__()
        self._step = step
        self._wrapper = wrapper
        # A joined rank steps its part with means that it did not help to make, so the reducer must give it those.
        if wrapper is not None:
            wrapper.reducer.joined_take_means = True

    def main_hook(self) -> None:
        # A forward under no_sync() is followed by no step.
        if self._wrapper is None or self._wrapper.require_forward_param_sync:
            self._step()
