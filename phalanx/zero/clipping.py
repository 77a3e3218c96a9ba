"""Clipping by the norm over all parameters, of whole gradients and of sharded ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import Collectives
from ..errors import ReductionError


def clip_gradients(
    params: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Where every rank has whole gradients, each does what a plain optimizer's user would do."""
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)


def _norm_of_norms(norm: torch.Tensor, norm_type: float, collectives: Collectives) -> torch.Tensor:
    """The norm over all ranks, from the norm of what each of them has."""
    everyone = torch.zeros(collectives.world, dtype=norm.dtype, device=norm.device)
    work = collectives.all_gather(everyone, norm.reshape(1))
    collectives.wait(work, "adding up the norm of gradients")
    norm = torch.linalg.vector_norm(everyone, norm_type)
    return norm


def clip_shards(
    shards: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, collectives: Collectives
) -> torch.Tensor:
    """Where every rank has the shards that it owns, together all gradients. The same norm, in the same order, everywhere."""
    shards = [part for part in shards if part.numel()]
    norms = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in shards]
    device = shards[0].device if shards else torch.device("cpu")
    together = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, dtype=torch.float64)
    total = _norm_of_norms(torch.linalg.vector_norm(together, norm_type), norm_type, collectives)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise ReductionError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`."
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in shards:
        part.mul_(coefficient.to(dtype=part.dtype, device=part.device))
    return total.to(torch.float32)
