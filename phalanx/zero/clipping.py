"""Clipping by the norm over all parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_gradients(
    params: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Where every rank has whole gradients, each does what a plain optimizer's user would do."""
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
