"""What compression left behind: for each gradient the part not yet sent, to be added to the next one.

This is error feedback. A residual belongs to its parameter, by name, and to this rank alone; it is
stored in one flat tensor per bucket, since that is how it is added. Must not know how one compresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....errors import StateError
from ...bucket import GradBucket


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which gradients of `dtype` are compressed and residuals kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(slots=True)
class _Kept:
    """The residuals of one bucket, and where each gradient's lies in them."""

    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    flat: torch.Tensor

    def pieces(self) -> dict[str, torch.Tensor]:
        return {name: self.flat.narrow(0, *span) for name, span in zip(self.names, self.spans, strict=True)}


class Residuals:
    """The residuals of all gradients of one hook state on one rank.

    A new plan moves gradients between buckets; their residuals move along.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        # By name: loaded, or in a bucket that no longer is; waiting for the bucket that holds them now.
        self._loose: dict[str, torch.Tensor] = {}

    def of(self, bucket: GradBucket, numel: int | None = None) -> torch.Tensor:
        """The flat residual of a bucket of reals, zeros at first, which the caller updates in place.

        `numel`, if given, is its length: at least the bucket's, the rest is padding.
        """
        buffer = bucket.buffer()
        numel = buffer.numel() if numel is None else numel
        kept = self._kept.get(bucket.index())
        if kept is not None and kept.names == bucket.names() and kept.flat.numel() == numel:
            return kept.flat
        if kept is not None:
            self._unbind()
        flat = torch.zeros(numel, dtype=accumulation_dtype(buffer.dtype), device=buffer.device)
        kept = _Kept(bucket.names(), bucket.spans(), flat)
        for name, piece in kept.pieces().items():
            if name in self._loose:
                piece.copy_(self._claim(name, piece))
        self._kept[bucket.index()] = kept
        return flat

    def named(self) -> dict[str, torch.Tensor]:
        """Every residual under its parameter's name: views of what the next step changes."""
        found = dict(self._loose)
        for kept in self._kept.values():
            found.update(kept.pieces())
        return found

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Forget all, and continue from these."""
        self._kept.clear()
        self._loose = {name: piece.detach().clone().flatten() for name, piece in named.items()}

    def _unbind(self) -> None:
        """Let go of every bucket at once: where one has changed, any gradient may be in any bucket."""
        for kept in self._kept.values():
            self._loose.update(kept.pieces())
        self._kept.clear()

    def _claim(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        loose = self._loose[name]
        if loose.numel() != piece.numel():
            raise StateError(
                f"the residual kept for {name!r} has {loose.numel()} elements, its gradient "
                f"{piece.numel()}. Load the state that was saved with this model, or use a new one."
            )
        return self._loose.pop(name)
