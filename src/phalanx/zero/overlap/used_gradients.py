"""Whole gradients that made an update during backward, remembered until the next one begins.

A backward adds to gradients that are still there. Of scattered ones the marker tells; of whole ones only this list does.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch


class UsedGradients:
    """The gradients that the last update was made of, as far as they are whole."""

    def __init__(self) -> None:
        # Weakly: users free gradients, and this must not keep them. With the version, since zeroing in place is freeing too.
        self._noted: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []

    def note(self, param: torch.Tensor) -> None:
        """The gradient of `param`, if it has one, has been used."""
        if param.grad is not None:
            self._noted.append((param, weakref.ref(param.grad), param.grad._version))

    def are_there(self, among: Collection[int] | None = None) -> bool:
        """Whether one of them still is its parameter's gradient, and unchanged; `among`: of parameters with these ids."""
        for param, reference, version in self._noted:
            if among is not None and id(param) not in among:
                continue
            grad = reference()
            if grad is not None and param.grad is grad and grad._version == version:
                return True
        return False

    def forget(self) -> None:
        """Another update begins, of other gradients."""
        self._noted.clear()
