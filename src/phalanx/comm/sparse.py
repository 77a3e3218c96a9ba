"""The sum of one sparse tensor over ranks: everybody's rows to everybody, added up in the order of ranks.

How many rows a rank has is known to nobody else. So each sends a parcel of a size that all agree on, with the
number of its rows in front; only if the largest does not fit is a second one sent, as large as it needs to be.
The size follows what was needed last: it grows at once and shrinks slowly, on every rank the same.

    words of int64:   rows | sparse dims | facts (float32) | indices | values

*Facts* are numbers of the caller that are summed too, so that they need no collective of their own.
Must not know of gradients or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import ReductionError
from .collectives import Collectives, Work

_HEAD = 2
_WORD = 8  # bytes
_FIRST_WORDS = 4096
_SLACK = 8  # an eighth more than was needed, and an eighth less at a time

Wait = Callable[[Work], None]


class SparseSum:
    """Sums sparse tensors of one shape, dtype and device, one at a time, with `num_facts` numbers beside each."""

    def __init__(
        self, collectives: Collectives, shape: Sequence[int], dtype: torch.dtype, device: torch.device, num_facts: int
    ) -> None:
        self._collectives = collectives
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._row_numels = [torch.Size(self._shape[dims:]).numel() for dims in range(len(self._shape) + 1)]
        self._num_facts = num_facts
        self._body_at = _HEAD + -(-num_facts // 2)
        self._words = self._body_at + _FIRST_WORDS
        self._memory = torch.empty(0, dtype=torch.int64, device=device)
        self._parcels = self._memory  # one row per rank, while under way
        self._facts = torch.empty(0, device=device)  # one row per rank
        self._rows: list[tuple[int, int]] = []  # how many, in how many sparse dimensions; by rank, once settled
        self._sent: torch.Tensor | None = None
        self._scale: float | torch.Tensor = 1.0

    def start(
        self, tensor: torch.Tensor, facts: torch.Tensor, scale: float | torch.Tensor = 1.0, waits_next: bool = False
    ) -> Work:
        """Send this rank's `tensor`, coalesced, times `scale`, and `facts`, float32. `waits_next` as of any collective."""
        assert tensor.is_coalesced(), "rows are sent as they are"
        self._sent, self._scale = tensor, scale
        self._rows = []
        work = self._send(self._words, facts, waits_next)
        self._facts = self._parcels[:, _HEAD : self._body_at].view(torch.float32)[:, : self._num_facts]
        return work

    def settle(self, work: Work, wait: Wait) -> Work:
        """Wait for the parcels; if some rank's did not fit, send larger ones. On every rank in the same order."""
        if self._rows:
            return work
        wait(work)
        self._rows = [(rows, dims) for rows, dims in self._parcels[:, :_HEAD].tolist()]
        needed = max(self._body_at + self._body_words(rows, dims) for rows, dims in self._rows)
        sent, self._words = self._words, max(needed + needed // _SLACK, self._words - self._words // _SLACK)
        if needed <= sent:
            return work
        facts = self._facts.clone()
        again = self._send(self._words, facts[self._collectives.rank])
        self._facts = facts
        return again

    def finish(self, work: Work, wait: Wait, facts: torch.Tensor) -> torch.Tensor:
        """The sum, coalesced, in memory of its own; `facts` becomes the sum of everybody's."""
        wait(self.settle(work, wait))
        self._sent = None
        torch.sum(self._facts, 0, out=facts)
        dims = {dims for rows, dims in self._rows if rows} or {1}
        if len(dims) > 1:
            raise ReductionError(
                f"{self._collectives.me}: ranks differ in the number of sparse dimensions of one tensor: "
                f"{[dims for _, dims in self._rows]}, in the order of ranks. Make it the same on every rank."
            )
        sparse_dims = dims.pop()
        pieces = [
            self._cut(parcel, rows, sparse_dims)
            for parcel, (rows, _) in zip(self._parcels, self._rows, strict=True)
            if rows
        ] or [self._cut(self._parcels[0], 0, sparse_dims)]
        indices = torch.cat([indices for indices, _ in pieces], dim=1)
        values = torch.cat([values for _, values in pieces])
        return torch.sparse_coo_tensor(
            indices, values, self._shape, device=self._device, check_invariants=False, is_coalesced=len(pieces) == 1
        ).coalesce()

    def _send(self, words: int, facts: torch.Tensor, waits_next: bool = False) -> Work:
        world, tensor = self._collectives.world, self._sent
        assert tensor is not None, "started before it is settled"
        if self._memory.numel() < world * words:
            self._parcels = self._memory = self._memory.new_empty(0)
            self._memory = self._collectives.allocate(world * words, torch.int64, self._device)
        self._parcels = self._memory[: world * words].view(world, words)
        own = self._parcels[self._collectives.rank]
        rows, dims = tensor._nnz(), tensor.sparse_dim()
        own[:_HEAD].copy_(torch.tensor([rows, dims], device="cpu"))
        own[_HEAD : self._body_at].view(torch.float32)[: self._num_facts].copy_(facts)
        if self._body_at + self._body_words(rows, dims) <= words:
            indices, values = self._cut(own, rows, dims)
            indices.copy_(tensor._indices())
            if isinstance(self._scale, torch.Tensor) or self._scale != 1.0:
                torch.mul(tensor._values(), self._scale, out=values)
            else:
                values.copy_(tensor._values())
        # Of another size in each step, which the ranks have told each other in the last one.
        return self._collectives.all_gather_told(self._parcels.view(-1), own, waits_next)

    def _body_words(self, rows: int, dims: int) -> int:
        return rows * dims + -(-rows * self._row_numels[min(dims, len(self._shape))] * self._dtype.itemsize // _WORD)

    def _cut(self, parcel: torch.Tensor, rows: int, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values as they lie in a parcel."""
        values_at = self._body_at + rows * dims
        end = self._body_at + self._body_words(rows, dims)
        values = parcel[values_at:end].view(self._dtype)[: rows * self._row_numels[dims]]
        return parcel[self._body_at : values_at].view(dims, rows), values.view(rows, *self._shape[dims:])
