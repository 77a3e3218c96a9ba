"""Giving out a mean without copying it: the bucket's own memory becomes the gradient.

`.grad` after backward is promised to be memory that nothing overwrites behind the user's back. A copy
keeps that promise; so does the bucket's memory itself, as long as the bucket takes other memory when a tensor of
it is still held at the next backward. Both questions, "does anyone else see this gradient?" and "is any of
this memory still out?", are answered by reference counts, exactly and without a pass over memory.
"""

from __future__ import annotations

import sys

import torch


def references(memory: torch.Tensor) -> int:
    """How many tensors (and storage objects) share the memory of `memory`."""
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))


def is_private(param: torch.nn.Parameter) -> bool:
    """Whether `param.grad` is seen by nobody: another tensor may stand in its place unnoticed."""
    grad = param.grad
    return (
        type(grad) is torch.Tensor
        and sys.getrefcount(grad) == _PRIVATE_OBJECTS
        and references(grad) == _PRIVATE_STORAGES
        and not grad.requires_grad
    )


def _counts_of_a_fresh_gradient() -> tuple[int, int]:
    """What the two counts are where `is_private` is true: a matter of the interpreter and of torch's version."""
    param = torch.nn.Parameter(torch.zeros(2))
    with torch.enable_grad():
        param.mul(2).sum().backward()
    grad = param.grad
    assert grad is not None, "backward has just made it"
    return sys.getrefcount(grad), references(grad)


_PRIVATE_OBJECTS, _PRIVATE_STORAGES = _counts_of_a_fresh_gradient()
