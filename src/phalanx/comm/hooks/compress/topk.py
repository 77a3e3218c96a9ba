"""The largest few gradients of each bucket, with error feedback for the others.

Each rank sends its own choice to all (one all-gather of indices and values), and every rank adds up
the same bytes in the same order, so replicas stay bit-identical.
"""

from __future__ import annotations

import math
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

# Half of what a value costs is its index, so not the 64 bits that would fit any tensor.
_INDEX = torch.int32
_SAMPLE_FROM = 2**16
_SAMPLE_EVERY = 64


class TopKState(HookState):
    """Settings and residuals of `topk_hook`. Settings must be equal on all ranks.

    `ratio` is the share of each bucket's elements that a rank sends, at least one element.
    `start_iter` is the number of steps at the beginning that average everything. Buckets hold fewer
    than 2**31 elements.
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        ratio: float = 0.01,
        start_iter: int = 0,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group)
        check_number("ratio", ratio, low=0.0, high=1.0)
        if not ratio:
            raise ConfigError("ratio is 0: nothing would be sent. Give the share of elements to send, above 0 and up to 1.")
        check_number("start_iter", start_iter, low=0)
        check_flags(use_error_feedback=use_error_feedback)
        self.ratio = ratio
        self.start_iter = start_iter
        self.use_error_feedback = use_error_feedback

    def config(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "start_iter": self.start_iter,
            "use_error_feedback": self.use_error_feedback,
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"residuals": self.residuals.named()}

    def load_tensors(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residuals.load(tensors["residuals"])


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average over the ranks what each rank holds to be its largest gradients. NaN counts as largest.

    One collective, launched before the call returns.
    """
    check_own_bucket("topk_hook", bucket)
    dense = state.iter < state.start_iter
    state.count_step(bucket)
    collectives = state.collectives()
    result = bucket.buffer()
    if dense or result.is_sparse or result.numel() == 0:
        return allreduce_hook(collectives, bucket)
    real = bucket.real()
    flat = real.buffer()
    corrected = state.residuals.add(real) if state.use_error_feedback else _widened(flat)
    count = max(1, math.ceil(state.ratio * flat.numel()))
    sent = select(corrected, count, flat.dtype)
    # The callback must not hold on to the group: docs/design/hooks.md.
    world = collectives.world
    received = torch.empty(world * sent.numel(), dtype=torch.uint8, device=flat.device)
    work = collectives.all_gather(received, sent)

    def add_up(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what went wrong
        total = torch.zeros_like(corrected)
        for piece in received.chunk(world):
            indices, values = _parts(piece, count, flat.dtype)
            # No index occurs twice within a piece, so the order of additions is that of the ranks.
            total.index_add_(0, indices, values.to(total.dtype))
        flat.copy_(total.mul_(1.0 / world))
        return result

    return work.get_future().then(add_up)


def select(corrected: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Indices and values (in `dtype`) of the `count` largest as bytes; `corrected` keeps what they miss."""
    indices = largest(corrected.abs(), count)
    # Zeroed for the padding's sake: all bytes that are sent are defined.
    sent = torch.zeros(_packed_bytes(count, dtype), dtype=torch.uint8, device=corrected.device)
    sent_indices, sent_values = _parts(sent, count, dtype)
    sent_indices.copy_(indices)
    chosen = corrected[indices]
    sent_values.copy_(chosen)
    # NaN or infinity arrives as it is in this step; kept, it would spoil every step to come. Looked for in what is sent,
    # since a narrow dtype makes infinity of what was finite. On a device the host does not ask whether there is any: a
    # pass over the residuals costs less than waiting for the answer.
    spoilt = corrected.device.type != "cpu" or not sent_values.isfinite().all()
    corrected[indices] = chosen.sub_(sent_values)
    if spoilt:
        corrected.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return sent


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the `count` largest, ascending. NaN counts as largest."""
    candidates = None
    on_cpu = magnitudes.device.type == "cpu"
    if on_cpu and magnitudes.numel() >= _SAMPLE_FROM and count < magnitudes.numel() // 4:
        # Selecting among all is slow on a CPU; elsewhere it is not, and counting candidates would make the host wait. A
        # sample says what is about large enough; if at least `count` are, the largest are among them, and the answer is
        # the same.
        sample = magnitudes[::_SAMPLE_EVERY]
        rank = min(sample.numel(), 3 * count // (2 * _SAMPLE_EVERY) + 16)
        threshold = sample.topk(rank, sorted=False).values.amin()
        candidates = (magnitudes < threshold).logical_not_().nonzero().flatten()
    if candidates is None or candidates.numel() < count:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices.sort().values]


def _aligned(num_bytes: int) -> int:
    """Rounded up so that whatever follows may be of any dtype."""
    return -(-num_bytes // 8) * 8


def _packed_bytes(count: int, dtype: torch.dtype) -> int:
    return _aligned(count * _INDEX.itemsize) + _aligned(count * dtype.itemsize)


def _parts(packed: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    split = _aligned(count * _INDEX.itemsize)
    indices = packed[: count * _INDEX.itemsize].view(_INDEX)
    return indices, packed[split : split + count * dtype.itemsize].view(dtype)


def _widened(flat: torch.Tensor) -> torch.Tensor:
    return flat.to(accumulation_dtype(flat.dtype), copy=True)
