"""Whether all ranks step by the same gradients, looked at in every step without an exchange of its own.

Each rank steps its part of the parameters by what its own `.grad` holds, and then all parameters are equal on all ranks. So
what one rank alone has clipped, scaled or dropped between backward and `step` ends up in a part of the model, and no drift
tells of it. A few elements of one gradient, of another parameter in each step, are voted on with the settings (`settings`).

That they differ need not be a mistake: each rank may add noise of its own to what it steps. So it is said once, and nothing
is refused. Not looked at: gradients of which a hook may leave each rank its own, and those on a device, for which the host
would have to wait.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence

import torch

from ..comm.collectives import Collectives
from ..comm.failure.folding import users_stacklevel
from ..ddp.features.drift import gather_digests
from ..ddp.reducer import Reducer

_NUM_SAMPLED = 4
_MOST_NAMES = 3  # of parameters, in words


class GradientVote:
    """The gradients of one optimizer's parameters, as far as wrappers reduce them."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._is_over = False  # it has been said, on all ranks

    def add(self, reducer: Reducer) -> None:
        """It reduces some of them."""
        self._reducers.add(reducer)

    def number(self, params: Sequence[torch.Tensor], step: int) -> int:
        """A number made of some elements of one gradient, of which `step` says; 0 where there is nothing to compare.

        Zeros count as nothing: of a parameter that no rank has used it is each rank's own affair which of the two it has.
        """
        if self._is_over or not params or any(reducer.strategy.name is not None for reducer in self._reducers):
            return 0
        grad = params[step % len(params)].grad
        if grad is None or not _is_plain(grad) or not grad.numel():
            return 0
        row = grad[tuple(size // 2 for size in grad.shape[:-1])].reshape(-1)[:_NUM_SAMPLED].tolist()
        return zlib.crc32(repr(row).encode()) if any(row) else 0

    def differ(self, params: Sequence[torch.Tensor], names: Mapping[int, str]) -> None:
        """The numbers of the ranks differ: say once whose gradients do, and where. Every rank calls it."""
        self._is_over = True
        nothing = torch.zeros(1, device="cpu")
        grads = [param.grad if param.grad is not None and _is_plain(param.grad) else nothing for param in params]
        rows = gather_digests(grads, self._collectives, "comparing the gradients of the ranks")
        odd = (rows != rows[0]).any(dim=0).nonzero().view(-1).tolist()
        ranks = set[int]()
        for column in (rows[:, place].tolist() for place in odd):
            usual = max(column, key=column.count)
            ranks |= {rank for rank, value in zip(self._collectives.ranks.numbers, column, strict=True) if value != usual}
        named = ", ".join(f"'{names[id(params[place])]}'" for place in odd[:_MOST_NAMES])
        more = f" and {len(odd) - _MOST_NAMES} more" if len(odd) > _MOST_NAMES else ""
        whose = f"{named}{more}, of rank {', '.join(map(str, sorted(ranks)))} not as of the others"
        warnings.warn(
            f"{self._collectives.me}: step() of ZeroRedundancyOptimizer: the gradients of the ranks differ: {whose}. Each "
            "rank steps a part of the parameters by its own, so that the model is trained by a mixture. Change gradients "
            "on every rank alike after backward, and clip them with the optimizer's clip_grad_norm_(). Noise of each "
            "rank's own is no mistake. Not said again.",
            stacklevel=users_stacklevel(),
        )


def _is_plain(grad: torch.Tensor) -> bool:
    return type(grad) is torch.Tensor and grad.layout is torch.strided
