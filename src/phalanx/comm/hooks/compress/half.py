"""Hooks that let gradients travel in 16 bits: as hooks of their own, or around another hook.

The average is made in 16 bits too. fp16 keeps 11 significant bits and overflows above 65504; bf16 keeps
8 and has the range of fp32. Complex gradients travel as pairs. Sparse ones travel as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...bucket import GradBucket
from ..allreduce import allreduce_hook
from ..contract import Hook, check_callable, check_own_bucket, hook_result
from ..group import GroupLike, collectives_from

# By wrapper: the hook to which it hands its state on.
inner_hooks: weakref.WeakKeyDictionary[Any, Hook] = weakref.WeakKeyDictionary()


def fp16_compress_hook(process_group: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in float16; the result is back in the bucket's own precision."""
    return _average_in(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in bfloat16; the result is back in the bucket's own precision."""
    return _average_in(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """`hook`, given a float16 copy of the bucket; its result is cast back to the bucket's own precision."""

    check_callable(hook)

    def fp16_compress_wrapper_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _run_in(torch.float16, hook, state, bucket)

    inner_hooks[fp16_compress_wrapper_hook] = hook
    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """`hook`, given a bfloat16 copy of the bucket; its result is cast back to the bucket's own precision."""

    check_callable(hook)

    def bf16_compress_wrapper_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _run_in(torch.bfloat16, hook, state, bucket)

    inner_hooks[bf16_compress_wrapper_hook] = hook
    return bf16_compress_wrapper_hook


def _average_in(dtype: torch.dtype, process_group: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    if buffer.is_sparse or buffer.dtype is dtype:
        return allreduce_hook(process_group, bucket)
    collectives = collectives_from(process_group)
    wide = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    # Divided before the cast: a gradient in range only as an average must not overflow on the way.
    narrow = wide.mul(1.0 / collectives.world).to(dtype)
    work = collectives.all_reduce(narrow)

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what went wrong
        wide.copy_(narrow)
        return buffer

    return work.get_future().then(widen)


def _run_in(dtype: torch.dtype, hook: Hook, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    check_own_bucket("16-bit wrapper", bucket)
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return hook(state, bucket)
    inner = bucket.real()
    wide = inner.buffer()
    inner.set_buffer(wide.to(dtype))

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        wide.copy_(hook_result(future.value(), inner))
        # A wrapper around this one that looks at gradients() must see the reduced ones.
        inner.set_buffer(wide)
        return buffer

    return hook(state, inner).then(widen)
