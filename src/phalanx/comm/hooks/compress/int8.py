"""Gradients in eight bits: blocks of integers with one scale each, and error feedback.

Each rank sends its own integers and scales to all (one all-gather), and every rank adds up the same
bytes in the same order, so replicas stay bit-identical. A rank receives (world - 1) bytes per element,
against 8 for a plain fp32 all-reduce: worth it up to about eight ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....checks import check_flags
from ....errors import ConfigError
from ...bucket import GradBucket
from ..allreduce import allreduce_hook
from ..contract import check_own_bucket
from ..group import GroupLike
from ..state import HookState, check_number
from .residual import accumulation_dtype

_LIMIT = 127.0
_SCALE_BYTES = 4


class Int8State(HookState):
    """Settings and residuals of `int8_hook`. Settings must be equal on all ranks.

    `block_size` elements share one fp32 scale; it must be a multiple of 4. Without error feedback
    small gradients beside large ones are lost for good.
    """

    def __init__(self, process_group: GroupLike = None, block_size: int = 256, use_error_feedback: bool = True) -> None:
        super().__init__(process_group)
        check_number("block_size", block_size, low=_SCALE_BYTES)
        check_flags(use_error_feedback=use_error_feedback)
        # Scales follow the integers in one run of bytes, so they must start at a multiple of their size.
        if block_size % _SCALE_BYTES:
            raise ConfigError(f"block_size must be a multiple of {_SCALE_BYTES}, got {block_size}.")
        self.block_size = int(block_size)
        self.use_error_feedback = use_error_feedback

    def config(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "use_error_feedback": self.use_error_feedback}

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"residuals": self.residuals.named()}

    def load_tensors(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residuals.load(tensors["residuals"])


def int8_hook(state: Int8State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket through int8 blocks. A block with a NaN or infinity arrives as NaN on every rank.

    One collective, launched before the call returns.
    """
    check_own_bucket("int8_hook", bucket)
    state.count_step(bucket)
    collectives = state.collectives()
    result = bucket.buffer()
    if result.is_sparse or result.numel() == 0:
        return allreduce_hook(collectives, bucket)
    real = bucket.real()
    flat = real.buffer()
    blocks = _corrected(state, real)
    sent = quantise(blocks, feedback=state.use_error_feedback)
    # The callback must not hold on to the group: docs/design/hooks.md.
    world = collectives.world
    received = torch.empty(world * sent.numel(), dtype=torch.uint8, device=sent.device)
    work = collectives.all_gather(received, sent)

    def add_up(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what went wrong
        total = torch.zeros_like(blocks)
        for piece in received.chunk(world):
            total.add_(dequantise(piece, blocks.shape, blocks.dtype))
        flat.copy_(total.mul_(1.0 / world).flatten()[: flat.numel()])
        return result

    return work.get_future().then(add_up)


def quantise(blocks: torch.Tensor, feedback: bool) -> torch.Tensor:
    """Integers and scales of (blocks, block_size) as bytes; with feedback `blocks` keeps what they miss."""
    num_blocks, size = blocks.shape
    sent = torch.empty(num_blocks * (size + _SCALE_BYTES), dtype=torch.uint8, device=blocks.device)
    integers, scales = _parts(sent, blocks.shape)
    # Two passes that vectorise; one for the largest magnitude takes six times as long as both.
    largest = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())
    # Never zero: a block of zeros divides as any other, and what is below the smallest scale waits.
    scales.copy_(largest.div_(_LIMIT)).clamp_min_(torch.finfo(torch.float32).tiny)
    # The scale as the others will read it, so that the residual is exact.
    scale = scales.to(blocks.dtype)
    rounded = blocks.div(scale).round_()
    integers.copy_(rounded)
    if feedback:
        blocks.addcmul_(rounded, scale, value=-1.0)
        # A block with NaN or infinity arrives as NaN in this step; kept, it would spoil every step to come. On a device the
        # host does not ask whether there is one: a pass over the residuals costs less than waiting for the answer.
        if blocks.device.type != "cpu" or not scale.isfinite().all():
            blocks.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return sent


def dequantise(received: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The (blocks, block_size) that `quantise` packed, in `dtype`."""
    integers, scales = _parts(received, shape)
    return integers.to(dtype).mul_(scales.to(dtype))


def _parts(packed: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, size = shape
    numel = num_blocks * size
    integers = packed[:numel].view(torch.int8).view(num_blocks, size)
    return integers, packed[numel:].view(torch.float32).view(num_blocks, 1)


def _corrected(state: Int8State, bucket: GradBucket) -> torch.Tensor:
    """Gradients plus residuals as (blocks, block_size), padded. With feedback the memory of the residuals."""
    flat = bucket.buffer()
    num_blocks = -(-flat.numel() // state.block_size)
    if state.use_error_feedback:
        padded = state.residuals.add(bucket, num_blocks * state.block_size)
    else:
        dtype = accumulation_dtype(flat.dtype)
        padded = torch.zeros(num_blocks * state.block_size, dtype=dtype, device=flat.device)
        padded[: flat.numel()].copy_(flat)
    return padded.view(num_blocks, state.block_size)
