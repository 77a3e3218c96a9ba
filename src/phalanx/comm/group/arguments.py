"""What c10d's methods are given: options in any of their forms, and tensors that may or may not fit.

Whatever these functions refuse goes to gloo, which says what is wrong in words that users know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..shm.transport.call import DTYPES, ReduceOp, parts
from .lane import Lane

# Options of c10d, whose classes are private to torch's C extension. Each has `asyncOp` and `timeout`,
# most have one or two fields more, named as c10d names them.
Options = Any

_Kind: Any = dist.ReduceOp.RedOpType
# By number: c10d's own kinds are slow to hash and to compare.
_REDUCE_OPS = {
    int(_Kind.SUM): ReduceOp.SUM,
    int(_Kind.AVG): ReduceOp.SUM,  # with a scale
    int(_Kind.PRODUCT): ReduceOp.PRODUCT,
    int(_Kind.MIN): ReduceOp.MIN,
    int(_Kind.MAX): ReduceOp.MAX,
    int(_Kind.BAND): ReduceOp.BAND,
    int(_Kind.BOR): ReduceOp.BOR,
    int(_Kind.BXOR): ReduceOp.BXOR,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_AVERAGE = int(_Kind.AVG)
_REDUCED_DTYPES = frozenset(DTYPES)
# One tensor in place of several stands for its equal successive parts.
Pieces = torch.Tensor | Sequence[torch.Tensor]


def movable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the shared memory path can carry these tensors."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
    return True


def reduce_op(tensors: Sequence[torch.Tensor], opts: Options, world: int) -> tuple[ReduceOp, float] | None:
    """The operation and the scale that are asked for; None if shared memory cannot do that to these tensors."""
    kind = int(opts.reduceOp.op)
    op = _REDUCE_OPS.get(kind)
    if op is None or not tensors:
        return None
    dtype = tensors[0].dtype
    if dtype.is_complex:
        # By pairs of reals, which only a sum may be made of.
        can_do = op is ReduceOp.SUM
    elif dtype is torch.bool:
        can_do = kind != _AVERAGE
    else:
        can_do = dtype in _REDUCED_DTYPES and not (dtype.is_floating_point and op in _BITWISE)
    if not can_do:
        return None
    if not movable(tensors) or any(t.dtype is not dtype for t in tensors[1:]):
        return None
    return op, 1.0 / world if kind == _AVERAGE else 1.0


def fits(one: torch.Tensor, whole: Pieces, lane: Lane) -> bool:
    """Whether `one` has the size and type of this rank's piece of `whole`."""
    if isinstance(whole, torch.Tensor):
        return one.numel() * lane.world == whole.numel() and one.dtype is whole.dtype
    own = whole[lane.rank] if len(whole) == lane.world else None
    return own is not None and one.numel() == own.numel() and len({t.dtype for t in (one, *whole)}) == 1


def all_fit(ones: Sequence[torch.Tensor], wholes: Sequence[Pieces], lane: Lane) -> bool:
    """Whether there are some, and each fits its whole."""
    return 0 < len(ones) == len(wholes) and all(fits(*pair, lane) for pair in zip(ones, wholes, strict=True))


def split(tensor: torch.Tensor, sizes: Sequence[int], world: int) -> list[torch.Tensor] | None:
    """The parts of a tensor that are to be exchanged, if it has such parts."""
    if not tensor.is_contiguous() or tensor.dim() == 0:
        return None
    if not sizes:
        return parts(tensor.view(-1), world) if tensor.shape[0] % world == 0 else None
    if len(sizes) != world or sum(sizes) != tensor.shape[0]:
        return None
    return list(tensor.split(list(sizes)))


def listed(tensors: Any) -> list[torch.Tensor]:
    """One tensor or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(kind: Any, given: Any, keywords: dict[str, Any]) -> Options:
    """c10d's options from what its overloads accept: options, or the operation or the root by itself."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    for name, value in keywords.items():
        if value is not None:
            setattr(options, {"op": "reduceOp", "root": "rootRank"}.get(name, name), value)
    return options
