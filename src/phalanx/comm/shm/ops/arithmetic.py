"""The arithmetic of reductions: several tensors into one, always in the order of the ranks.

The order is fixed, so the result depends neither on timing nor on which rank computes it. Sums and
products of 16-bit floats are carried in float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..transport.signature import ReduceOp

_Operation = Callable[..., torch.Tensor]

# By the number of the ReduceOp.
_OPERATIONS: tuple[_Operation, ...] = (
    torch.add,
    torch.mul,
    torch.minimum,
    torch.maximum,
    torch.bitwise_and,
    torch.bitwise_or,
    torch.bitwise_xor,
)
_CARRIED_WIDE = (torch.float16, torch.bfloat16)
_ROUNDING = (ReduceOp.SUM, ReduceOp.PRODUCT)

# Elements a reduction handles at a time: what is read stays in the second-level cache until it is
# written to the last of its places.
CHUNK_BYTES = 256 * 1024


def reduce_into(
    target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp, scale: float = 1.0
) -> None:
    """Write scale × the reduction of `sources` to `target`, which may be the first source itself.

    All are flat, of one length and one dtype. `target` may be any of the sources.
    """
    operation = _OPERATIONS[op]
    if len(sources) == 1:
        if target is not sources[0]:
            target.copy_(sources[0])
        scale_in_place(target, scale)
    elif len(sources) > 2 and (_rounds_often(target.dtype, op) or _is_one_of(target, sources[2:])):
        # In a place of its own: wider, or because `target` is still to be read.
        wide = torch.float32 if target.dtype in _CARRIED_WIDE else target.dtype
        carried = sources[0].to(wide, copy=True)
        for source in sources[1:]:
            operation(carried, source, out=carried)
        scale_in_place(carried, scale)
        target.copy_(carried)
    elif scale != 1.0 and _rounds_often(target.dtype, op):
        carried = operation(sources[0].to(torch.float32), sources[1])
        scale_in_place(carried, scale)
        target.copy_(carried)
    else:
        operation(sources[0], sources[1], out=target)
        for source in sources[2:]:
            operation(target, source, out=target)
        scale_in_place(target, scale)


def _rounds_often(dtype: torch.dtype, op: ReduceOp) -> bool:
    # Two 16-bit terms are added in float32 and rounded once anyway; more, or a factor, are not.
    return dtype in _CARRIED_WIDE and op in _ROUNDING


def _is_one_of(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    address = target.data_ptr()
    return any(source.data_ptr() == address for source in sources)


def scale_in_place(tensor: torch.Tensor, scale: float) -> None:
    """Multiply by `scale`. Integers are divided by its inverse, a whole number."""
    if scale == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(scale)
    else:
        # A mean of integers: the quotient towards zero, as C and NCCL have it.
        tensor.div_(round(1 / scale), rounding_mode="trunc")
