"""Memory to use again and again: fresh pages cost more than what is received into them."""

from __future__ import annotations

import torch

from .arena import Arena


class Scratch:
    """One piece of memory in the segment, as large as the largest that was asked for."""

    def __init__(self, memory: Arena) -> None:
        self._memory = memory
        self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> torch.Tensor:
        """So many bytes, contents undefined, until the next time that somebody asks."""
        if self._piece.numel() < num_bytes:
            self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")  # its memory returns before more is taken
            self._piece = self._memory.allocate(num_bytes, torch.uint8)
        return self._piece[:num_bytes]
