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


def is_private(param: torch.Tensor) -> bool:
    """Whether `param.grad` is seen by nobody: another tensor may stand in its place unnoticed."""
    return _counts(param) == _PRIVATE


def is_just_made(param: torch.Tensor) -> bool:
    """As `is_private`, for a hook on `param`: autograd made the gradient for it and is about to let go of it.

    Without the version, a gradient that was added to in place and is held by one other would look the same.
    """
    return _counts(param) == _JUST_MADE and param.grad is not None and param.grad._version == 0


def _counts(param: torch.Tensor) -> tuple[int, int] | None:
    """References to the gradient's object and to its memory; None for a gradient that is no plain tensor."""
    grad = param.grad
    if type(grad) is not torch.Tensor or grad.requires_grad:
        return None
    return sys.getrefcount(grad), references(grad)


def _counts_of_a_fresh_gradient() -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """After its backward, and in a hook: both are a matter of the interpreter and of torch's version."""
    param = torch.nn.Parameter(torch.zeros(2))
    in_hook: list[tuple[int, int] | None] = []
    param.register_post_accumulate_grad_hook(lambda made: in_hook.append(_counts(made)))
    with torch.enable_grad():
        param.mul(2).sum().backward()
    return _counts(param), in_hook[0]


_PRIVATE, _JUST_MADE = _counts_of_a_fresh_gradient()
