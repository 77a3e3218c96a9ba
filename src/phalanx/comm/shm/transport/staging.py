"""The staging buffer: where data that does not lie in shared memory is shown to the other ranks, block by block.

Each rank has one of two halves, in the arena of its control block. Block n of whatever is shown goes to half
n mod 2, counted over all collectives of the team, so a rank may fill the half for block n + 1 while
others still read block n. It fills the half of block n + 2 only after the step which follows the
filling of n + 1, and no rank takes that step before it has done with block n.

The buffer is small enough to stay in the processor's caches, so showing data costs little more than
reading it once.
"""

from __future__ import annotations

import torch

from .team import NOWHERE, Places, Team

BLOCK_BYTES = 1 << 20


class StagingBuffer:
    """A team's staging buffers, as this rank sees them."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._own: torch.Tensor | None = None  # freed with the team
        self._offset = NOWHERE
        self._num_blocks = 0  # shown so far
        self._halves: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @property
    def offset(self) -> int:
        """Where peers find this rank's buffer; made on first asking."""
        if self._own is None:
            self._own, self._offset = self._team.allocate_staging(2 * BLOCK_BYTES)
        return self._offset

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's half for the next block."""
        self._team.watch.check()
        at = self.offset + (self._num_blocks & 1) * BLOCK_BYTES
        return self._team.staging(self._team.index, at, BLOCK_BYTES // dtype.itemsize, dtype)

    def turn(self, places: list[Places], dtype: torch.dtype) -> list[torch.Tensor]:
        """Everybody's half for the next block, by index, which thereby becomes the current one."""
        pair = self._halves.get(dtype)
        if pair is None:
            pair = self._halves[dtype] = (self._views(places, dtype, 0), self._views(places, dtype, 1))
        self._num_blocks += 1
        return pair[(self._num_blocks - 1) & 1]

    def _views(self, places: list[Places], dtype: torch.dtype, half: int) -> list[torch.Tensor]:
        numel = BLOCK_BYTES // dtype.itemsize
        return [
            self._team.staging(index, place.staging + half * BLOCK_BYTES, numel, dtype)
            for index, place in enumerate(places)
        ]
