"""Clipping by the norm over all parameters, of whole gradients and of sharded ones.

Must not know how gradients came to be sharded, nor who steps with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from ..comm.collectives import Collectives
from ..ddp.passes.order import recover
from ..errors import ArgumentTypeError, ConfigError, MismatchError, ReductionError


def check_limits(max_norm: object, norm_type: object) -> None:
    """Refuse limits by which no gradient can be clipped."""
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        is_vector = isinstance(value, torch.Tensor) and value.numel() != 1
        if is_vector or isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
            raise ArgumentTypeError(f"{name} of clip_grad_norm_ is a number, got {value!r}.")
        if not float(value) >= 0:
            raise ConfigError(
                f"{name} of clip_grad_norm_ is {value!r}: every gradient would become NaN or change its sign. Give a number "
                "above 0; float('inf') leaves gradients as they are, or means the largest element."
            )


def clip_gradients(
    params: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    collectives: Collectives | None,
) -> torch.Tensor:
    """Where every rank has whole gradients, each does what a plain optimizer's user would do.

    If `collectives` are given, the limits are compared before a gradient changes. The next step would tell as well, but only
    when the other ranks have updated their own shards. Not on a device, where the host would have to wait for the answer.
    """
    if collectives is None or collectives.world == 1 or any(param.device.type != "cpu" for param in params):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    recover(collectives.group)  # of a backward that failed, more may be under way on some ranks than on others
    limits = float(max_norm), float(norm_type), float(error_if_nonfinite)
    mine = torch.tensor(limits, dtype=torch.float64, device="cpu")
    everyone = torch.zeros(collectives.world * len(mine), dtype=torch.float64, device="cpu")
    # Under way while the norm is computed, which takes longer.
    work = collectives.all_gather(everyone, mine)
    norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
    collectives.wait(work, "comparing the limits of clip_grad_norm_")
    _refuse_other_limits(everyone.view(collectives.world, -1), collectives)
    _refuse_nonfinite(norm, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def clip_shards(
    shards: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    collectives: Collectives,
) -> torch.Tensor:
    """Where every rank has the shards that it owns of `grads`, which no rank has whole.

    The same norm, bit for bit, on every rank, of the dtype that torch gives it. Only dtype and device are read of
    `grads`: a rank that owns no element of any of them must know both to take part in the gather.
    """
    # Torch counts tensors that have an element other than 0. Of a tensor in slices no rank knows that alone.
    if float(norm_type) == 0:
        raise ConfigError(
            "norm_type of clip_grad_norm_ is 0, which counts parameters with a gradient: not known of gradients in shards. "
            "Give a number above 0, or make the optimizer with overlap_with_ddp=False."
        )
    if not grads:
        return torch.tensor(0.0)
    shards = [part for part in shards if part.numel()]
    norms = [_norm(part, norm_type).to(grads[0].device, non_blocking=True) for part in shards]
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=grads[0].device)
    limits = (float(max_norm), float(norm_type), float(error_if_nonfinite))
    total = _norm_of_norms(torch.linalg.vector_norm(own, norm_type), limits, collectives)
    _refuse_nonfinite(total, norm_type, error_if_nonfinite)
    # The small number is torch's, so that equal norms clip equally. It also keeps a norm of zero from dividing.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in shards:
        # Real also for complex gradients: a complex factor would turn an infinite part into NaN. Not rounded to bfloat16,
        # in which all gradients would be scaled by up to 0.4 % more or less than asked for.
        dtype = torch.promote_types(part.dtype.to_real(), torch.float32)
        part.mul_(coefficient.to(dtype=dtype, device=part.device, non_blocking=True))
    return total.to(reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads)))


def clipped_in_join(me: str) -> ConfigError:
    """Said at the first step: who has joined does not clip, and is met elsewhere once a rank has run out of inputs."""
    return ConfigError(
        f"{me}: clip_grad_norm_() inside join(): no rank has whole gradients, and one that has run out of inputs does not "
        "take part in adding up their norm. Make the optimizer with overlap_with_ddp=False."
    )


def _refuse_nonfinite(norm: torch.Tensor, norm_type: float, is_asked: bool) -> None:
    if is_asked and not bool(torch.isfinite(norm)):
        raise ReductionError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`."
        )


def _refuse_other_limits(limits: torch.Tensor, collectives: Collectives) -> None:
    """`limits`: max_norm, norm_type and error_if_nonfinite of each rank."""
    if not bool((limits != limits[0]).any()):
        return
    by_rank = zip(collectives.ranks.numbers, limits.tolist(), strict=True)
    words = "rank {}: max_norm={:g}, norm_type={:g}, error_if_nonfinite={}"
    said = [words.format(rank, row[0], row[1], bool(row[2])) for rank, row in by_rank]
    raise MismatchError(
        f"{collectives.me}: the ranks differ in the limits of clip_grad_norm_ ({'; '.join(said)}). No gradient "
        "was changed. Give every rank the same arguments."
    )


def _norm(part: torch.Tensor, norm_type: float) -> torch.Tensor:
    # In double precision, so that the norm hardly depends on where gradients were cut.
    dtype = torch.complex128 if part.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(part, norm_type, dtype=dtype)
    return norm


def _norm_of_norms(own: torch.Tensor, limits: tuple[float, float, float], collectives: Collectives) -> torch.Tensor:
    """The norm over all ranks, from the norm of what each of them has; all must clip by the same `limits`."""
    # Gathered, not added up: each rank then adds the same numbers in the same order, so that all clip alike.
    # With the limits beside it, which are compared at no collective's cost.
    mine = torch.empty(1 + len(limits), dtype=torch.float64, device=own.device)
    mine[0] = own
    for place, limit in enumerate(limits, start=1):
        mine[place] = limit  # filled by the device: to copy them there would make the host wait
    everyone = torch.zeros(collectives.world * len(mine), dtype=torch.float64, device=own.device)
    collectives.wait(collectives.all_gather(everyone, mine), "adding up the norm of gradients")
    rows = everyone.view(collectives.world, -1)
    # On a device the host would have to wait for the answer; there the next backward tells (`zero.settings`).
    if own.device.type == "cpu":
        _refuse_other_limits(rows[:, 1:], collectives)
    norm: torch.Tensor = torch.linalg.vector_norm(rows[:, 0], limits[1])
    return norm.to(own.dtype)
