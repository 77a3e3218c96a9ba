"""What stands in `param.grad` for a gradient of which each rank has only its own slice.

Reading it as a whole gradient would be wrong without notice, so anything that tries gets an error that says what
to use instead. Allowed is what has an exact meaning on slices: zeroing, accumulating another backward's gradient
until that is reduced too, and a GradScaler's unscaling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...errors import ReductionError
from ...plan.params import gradient_dtype

_aten = torch.ops.aten


class SliceKeeper(Protocol):
    """Who has the slices. Parameters are named by their numbers in the optimizer."""

    def zero_slices(self, numbers: Sequence[int]) -> None:
        """Set this rank's slices of these gradients to zero."""

    def unscale_slices(self, numbers: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Multiply them, and set `found_inf` on all ranks if any rank found a number that is not finite."""


class ScatteredGradient(torch.Tensor):
    """Has the shape of a parameter and no memory. `pending` is local gradient not reduced yet.

    `is_zero`: the user has zeroed it since it was given out.
    """

    number: int
    pending: torch.Tensor | None
    is_zero: bool
    keeper: weakref.ref[SliceKeeper]

    @staticmethod
    def __new__(cls, param: torch.Tensor, number: int, keeper: SliceKeeper) -> ScatteredGradient:
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=gradient_dtype(param), device=param.device
        )
        made.number = number
        made.pending = None
        made.is_zero = False
        made.keeper = weakref.ref(keeper)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ScatteredGradient(shape={tuple(self.shape)}, dtype={self.dtype}: each rank has its own slice)"

    # No function of torch is special, all are caught below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first: Any = args[0] if args else None
        if func is _aten.add_.Tensor and isinstance(first, cls) and not isinstance(args[1], cls):
            # Autograd adds the gradient of a further backward.
            new = args[1]
            first.pending = new.clone() if first.pending is None else first.pending.add_(new)
            return first
        if func is _aten.zero_.default:
            _zero([first])
            return first
        if func is _aten._foreach_zero_.default and all(isinstance(one, cls) for one in first or ()):
            _zero(first)
            return None
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(first, args[1], args[2])
        raise ReductionError(
            f"{func} was called on the gradient of a parameter that ZeroRedundancyOptimizer(overlap_with_ddp=True) "
            "scattered: each rank has only its own slice, and with step_in_backward=True it has been used already. "
            "Make the optimizer with step_in_backward=False and use its clip_grad_norm_(), or "
            "overlap_with_ddp=False to have whole gradients."
        )


def _keeper(markers: Sequence[Any]) -> SliceKeeper:
    if not all(isinstance(marker, ScatteredGradient) for marker in markers):
        raise ReductionError("whole and scattered gradients were given together. Call zero_grad() in between.")
    keeper = markers[0].keeper()
    if keeper is None:
        raise ReductionError("the optimizer that scattered this gradient is gone. Call model.zero_grad().")
    found: SliceKeeper = keeper
    return found


def _zero(markers: Sequence[Any]) -> None:
    # Where the optimizer is gone, so are its slices, and what a user asks for is true already.
    if any(marker.keeper() is not None for marker in markers):
        _keeper(markers).zero_slices([marker.number for marker in markers])
    for marker in markers:
        marker.pending = None
        marker.is_zero = True


def _unscale(markers: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    _keeper(markers).unscale_slices([marker.number for marker in markers], found_inf, inverse_scale)


def take_pending(param: torch.Tensor) -> bool:
    """Replace a scattered gradient by the local one that has been added to it, or none; true if it was one."""
    marker = param.grad
    if not isinstance(marker, ScatteredGradient):
        return False
    param.grad, marker.pending = marker.pending, None
    return True


def fill_zeroed(param: torch.Tensor) -> None:
    """Make a scattered gradient that the user has zeroed a whole one, of what has been added to it since."""
    marker = param.grad
    if isinstance(marker, ScatteredGradient) and marker.is_zero:
        whole = torch.zeros_like(param, dtype=marker.dtype) if marker.pending is None else marker.pending
        param.grad, marker.pending = whole, None
