"""Sparse gradients: each is a bucket of its own, summed row by row with its tail beside it (`comm/sparse.py`)."""

from __future__ import annotations

import torch

from .bucket import LiveBucket


def pack_sparse(bucket: LiveBucket, scale: float) -> None:
    """Bring the local gradient into shape for a sparse sum; a parameter without one adds nothing."""
    param = bucket.params[0]
    grad = param.grad
    if grad is None:
        bucket.sparse_grad = _nothing(param)
        return
    if grad.layout == torch.strided:
        grad = grad.to_sparse(1)
    # Rows are added up before they are scaled, as one process would.
    grad = grad.detach().coalesce()
    bucket.sparse_grad = grad if scale == 1.0 else _with_values(grad, grad._values() * scale)


def unpack_sparse(bucket: LiveBucket, factor: float, wanted: bool) -> None:
    """Give the parameter the mean, unless no rank used it."""
    if wanted and bucket.sparse_grad is not None:
        mean = bucket.sparse_grad.coalesce()
        bucket.params[0].grad = mean if factor == 1.0 else _with_values(mean, mean._values() * factor)


def pack_nothing(bucket: LiveBucket) -> None:
    """As `pack_sparse`, for a rank that takes part without a gradient of its own."""
    bucket.sparse_grad = _nothing(bucket.params[0])


def _nothing(param: torch.Tensor) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, tuple(param.shape), check_invariants=False, is_coalesced=True)


def _with_values(sparse: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        sparse._indices(), values, tuple(sparse.shape), check_invariants=False, is_coalesced=True
    )
