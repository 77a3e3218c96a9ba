"""Whole gradients that made an update during backward, remembered until the next one begins.

A backward adds to gradients that are still there. Of scattered ones the marker tells; of whole ones only this list does.
"""

from __future__ import annotations

import weakref

import torch


class UsedGradients:
    """The gradients that the last update was made of, as far as they are whole."""

    def __init__(self) -> None:
        # Weakly: users free gradients, and this must not keep them. With the version, since zeroing in place is freeing too.
        self._noted: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self, param: torch.Tensor) -> None:
        """The gradient of `param`, if it has one, has been used."""
        if param.grad is not None:
            self._noted[param] = weakref.ref(param.grad), param.grad._version

    def are_there(self) -> bool:
        """Whether one of them still is its parameter's gradient, and unchanged."""
        return any(map(self.is_there, self._noted))

    def is_there(self, param: torch.Tensor) -> bool:
        """Whether that of `param` is."""
        reference, version = self._noted.get(param, (None, 0))
        grad = None if reference is None else reference()
        return grad is not None and param.grad is grad and grad._version == version

    def first_changed(self) -> torch.Tensor | None:
        """A parameter with another gradient than the one noted, or that with other values; not if it was zeroed."""
        for param, (reference, version) in self._noted.items():
            grad = param.grad
            if grad is None or (grad is reference() and grad._version == version):
                continue
            if bool(grad.any()):
                return param
        return None

    def forget(self) -> None:
        """Another update begins, of other gradients."""
        self._noted.clear()
