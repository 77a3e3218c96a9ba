"""The flat buffer of one bucket and the tensors that name its parts. Knows whether any of it has been given away."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan import ParamSpec, Slot
from .lending import references


class BucketMemory:
    """`body`: the gradients; `views`: each of them in its parameter's shape; `tail`: what rides behind them."""

    __slots__ = ("_own_references", "body", "flat", "is_out", "tail", "views")

    def __init__(self, flat: torch.Tensor, slots: Sequence[Slot], specs: Sequence[ParamSpec], tail_numel: int) -> None:
        """`flat` may be longer than body and tail."""
        numel = sum(slot.numel for slot in slots)
        self.flat = flat
        self.body = flat.narrow(0, 0, numel)
        self.tail = flat.narrow(0, numel, tail_numel)
        self.views = [
            self.body.as_strided(spec.shape, spec.stride, self.body.storage_offset() + slot.offset)
            for slot, spec in zip(slots, specs, strict=False)
        ]
        self.is_out = False  # whether a part of it has been given out as a gradient
        self._own_references = references(flat)

    @property
    def is_held(self) -> bool:
        """Whether tensors of others share this memory."""
        return references(self.flat) > self._own_references
