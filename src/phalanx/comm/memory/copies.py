"""Copying many tensors at once, and tensors whose values are not those of their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of `sources` into the tensor at its place in `targets`, by one operation.

    A tensor may stand for the conjugate, or the negative, of its memory: the gradient of `weight.mH` does. Into such a one
    torch copies only by itself.
    """
    try:
        torch._foreach_copy_(list(targets), list(sources))
    except RuntimeError:
        if not any(target.is_conj() or target.is_neg() for target in targets):
            raise
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def as_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds the values, and pairs of reals where they are complex: to be looked at bit by bit."""
    resolved = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(resolved) if resolved.is_complex() else resolved
