"""What compression left behind: for each gradient the part not yet sent, to be added to the next one.

This is error feedback. A residual belongs to its parameter, by name, and to this rank alone; it is
stored in one flat tensor per bucket, since that is how it is added, and laid out in it as its gradient
is in the bucket. Must not know how one compresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....errors import StateError
from ...bucket import GradBucket, Layout


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which gradients of `dtype` are compressed and residuals kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(slots=True)
class _Kept:
    """The residuals of one bucket, and where each gradient's lies in them."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    flat: torch.Tensor

    def pieces(self) -> dict[str, torch.Tensor]:
        return {name: self.flat.as_strided(*layout) for name, layout in zip(self.names, self.layouts, strict=True)}


class Residuals:
    """The residuals of all gradients of one hook state on one rank.

    A new plan moves gradients between buckets; their residuals move along. Between `begin` and `keep` or `restore` those
    from before are not written to, so that a step which is thrown away costs nothing but an exchange of references.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        # By name: loaded, or in a bucket that no longer is; waiting for the bucket that holds them now.
        self._loose: dict[str, torch.Tensor] = {}
        # Both as they were when the step under way began. None outside of one, and where nobody tells of steps.
        self._before: tuple[dict[int, _Kept], dict[str, torch.Tensor]] | None = None
        # By bucket, the memory of the step before the last one: a new piece in each step would be new pages in each step.
        self._spare: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """A step begins, which may be thrown away."""
        self._before = dict(self._kept), dict(self._loose)

    def keep(self) -> None:
        """The step is over, and its residuals count."""
        if self._before is not None:
            # Not that of a bucket which holds other gradients now: some of the old ones may lie there still, loose.
            self._spare = {
                index: old.flat
                for index, old in self._before[0].items()
                if (new := self._kept.get(index)) is not None and new is not old and new.names == old.names
            }
            self._before = None

    def restore(self) -> None:
        """The step was thrown away: nothing of it stays, and what it took from before is back."""
        if self._before is not None:
            before = self._before[0]
            self._spare |= {index: new.flat for index, new in self._kept.items() if before.get(index) is not new}
            self._kept, self._loose = self._before
            self._before = None

    def add(self, bucket: GradBucket, numel: int | None = None) -> torch.Tensor:
        """The gradients of a bucket of reals plus their residual, zeros at first: flat, and the residual from now on.

        The caller takes off in place what it sends. `numel`, if given, is the length: at least the bucket's, the rest is
        padding, in zeros.
        """
        gradients = bucket.buffer()
        kept = self._bound(bucket, gradients.numel() if numel is None else numel)
        count = gradients.numel()
        # A late part of a bucket comes in the same step: the residual is this step's own already.
        if self._before is None or self._before[0].get(bucket.index()) is not kept:
            kept.flat[:count].add_(gradients)
            return kept.flat
        flat = self._spare.pop(bucket.index(), None)
        if flat is None or flat.shape != kept.flat.shape or flat.dtype != kept.flat.dtype or flat.device != kept.flat.device:
            flat = torch.empty_like(kept.flat)
        torch.add(kept.flat[:count], gradients, out=flat[:count])
        flat[count:] = 0.0
        self._kept[bucket.index()] = _Kept(kept.names, kept.layouts, flat)
        return flat

    def _bound(self, bucket: GradBucket, numel: int) -> _Kept:
        """What is kept for the gradients that are in this bucket now."""
        buffer = bucket.buffer()
        kept = self._kept.get(bucket.index())
        # The model may have gone to another dtype, device or memory format, in which it keeps its names.
        dtype = accumulation_dtype(buffer.dtype)
        if kept is not None and kept.names == bucket.names() and kept.flat.numel() == numel:
            if kept.layouts == bucket.layouts() and kept.flat.dtype is dtype and kept.flat.device == buffer.device:
                return kept
        # Also those of a gradient that comes from a place where nobody asks for residuals any more: a bucket of vectors has
        # none with PowerSGD, a sparse one with any hook.
        names = set(bucket.names())
        if kept is not None or any(not names.isdisjoint(other.names) for other in self._kept.values()):
            self._unbind()
        flat = torch.zeros(numel, dtype=dtype, device=buffer.device)
        kept = _Kept(bucket.names(), bucket.layouts(), flat)
        for name, piece in kept.pieces().items():
            if name in self._loose:
                self._claim(name, piece)
        self._kept[bucket.index()] = kept
        return kept

    def named(self) -> dict[str, torch.Tensor]:
        """Every residual under its parameter's name, as the last step that counts left it: views, not copies."""
        bound, loose = (self._kept, self._loose) if self._before is None else self._before
        found = dict(loose)
        for kept in bound.values():
            found.update(kept.pieces())
        return found

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Forget all, and continue from these."""
        self._kept, self._before = {}, None
        self._loose = {name: piece.detach().clone() for name, piece in named.items()}

    def _unbind(self) -> None:
        """Let go of every bucket at once: where one has changed, any gradient may be in any bucket."""
        for kept in self._kept.values():
            self._loose.update(kept.pieces())
        self._kept.clear()

    def _claim(self, name: str, piece: torch.Tensor) -> None:
        loose = self._loose[name]
        if loose.shape == piece.shape:
            piece.copy_(loose)
        elif loose.shape == (piece.numel(),):  # saved before shapes were: as it lay in memory
            piece.as_strided((piece.numel(),), (1,)).copy_(loose)
        else:
            raise StateError(
                f"the residual kept for {name!r} has shape {tuple(loose.shape)}, its gradient "
                f"{tuple(piece.shape)}. Load the state that was saved with this model, or use a new one."
            )
        del self._loose[name]
