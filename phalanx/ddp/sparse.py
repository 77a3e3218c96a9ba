"""Sparse gradients: each travels alone, as indices and values, summed by the process group itself."""

from __future__ import annotations

import torch

from .bucket import LiveBucket


def pack_sparse(bucket: LiveBucket, scale: float) -> None:
    """Bring the local gradient into shape for a sparse sum; a parameter without one adds nothing."""
    param = bucket.params[0]
    grad = param.grad
    if grad is None:
        shape = tuple(param.shape)
        indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
        values = torch.empty((0, *shape[1:]), dtype=param.dtype, device=param.device)
        grad = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    elif grad.layout == torch.strided:
        grad = grad.detach().to_sparse(1)
    bucket.sparse_grad = (grad.detach() * scale).coalesce()


def unpack_sparse(bucket: LiveBucket, factor: float, wanted: bool) -> None:
    """Give the parameter the mean, unless no rank used it."""
    if wanted and bucket.sparse_grad is not None:
        mean = bucket.sparse_grad if factor == 1.0 else bucket.sparse_grad * factor
        bucket.params[0].grad = mean.coalesce()
