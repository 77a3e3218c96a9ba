"""A sparse gradient: a bucket of its own, summed row by row with its tail beside it (`comm/sparse.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm.sparse import SparseSum
from ...plan.params import gradient_dtype
from . import slot
from .bucket import Bucket, Contents, Scale, Stage, multiplies
from .slot import ABSENT, COPIED, LATE


class SparseBucket(Bucket):
    """One parameter whose gradient has few rows. Taken, it lies in `gradient` in place of a body."""

    sparse = True

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents)
        self.dtype = contents.planned.dtype  # of what travels; parameters may be in low precision for a while
        self.gradient: torch.Tensor | None = None
        self.scale: Scale = 1.0  # what is owed to it yet: whoever sends it multiplies while copying
        self.rows: SparseSum | None = None  # made by the strategy that first sums rows
        self._tail_data = torch.zeros(self.tail.numel, dtype=torch.float32, device=self.params[0].device)
        self._before: torch.Tensor | None = None  # what `.grad` was when it was taken

    @property
    def tail_data(self) -> torch.Tensor:
        return self._tail_data

    def take(self, scale: Scale) -> list[int] | None:
        param, state = self.params[0], self.states[0]
        grad, param.grad = param.grad, None
        if state == LATE and grad is not None and self._before is not None:
            # Not launched yet: both parts leave together.
            grad = _sum(_as_rows(self._before).to(grad.dtype), _as_rows(grad))
        self._before = grad
        if state == ABSENT:
            self._earlier.add(0)
        self.gradient, self.scale = self._nothing if grad is None else _as_rows(grad).to(self.dtype), scale
        slot.pack(self.states, 0)
        return None if grad is not None and state != ABSENT else [0]

    def take_nothing(self) -> None:
        param = self.params[0]
        self._before, param.grad = param.grad, None
        self.gradient = self._nothing
        slot.pack(self.states, 0)

    def multiply(self) -> torch.Tensor:
        """The gradient to send, for whoever does not multiply it."""
        assert self.gradient is not None, "a bucket is packed before it is launched"
        self.gradient, self.scale = _scaled(self.gradient, self.scale), 1.0
        return self.gradient

    def clear(self) -> None:
        self.gradient = self._nothing

    def scale_mean(self, factor: Scale) -> None:
        assert self.gradient is not None, "a bucket that is back has a mean"
        self.gradient = _scaled(self.gradient.coalesce(), factor)

    def add(self, other: Bucket) -> None:
        assert isinstance(other, SparseBucket), "late parts of a sparse bucket are sparse"
        assert self.gradient is not None and other.gradient is not None, "both are back"
        self.gradient = _sum(self.gradient.coalesce(), other.gradient.coalesce())

    def give(self, wanted: Sequence[int] | None) -> None:
        self.stage = Stage.GIVEN
        used = wanted is None or wanted[0]
        if used and self.gradient is not None:
            self._set_grad(self.gradient.coalesce())
        elif self._before is not None:  # else another wrapper of the parameter may have given it its mean
            self._set_grad(self._before)
        slot.give(self.states, 0, COPIED)
        self.gradient = self._before = None

    def abandon(self) -> None:
        if self.states[0] in slot.GONE and self._before is not None:
            self._set_grad(self._before)
        self._before = None
        super().abandon()

    def _set_grad(self, grad: torch.Tensor) -> None:
        param = self.params[0]
        param.grad = grad.to(gradient_dtype(param))

    @property
    def _nothing(self) -> torch.Tensor:
        param = self.params[0]
        indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
        values = torch.empty((0, *param.shape[1:]), dtype=self.dtype, device=param.device)
        return torch.sparse_coo_tensor(
            indices, values, tuple(param.shape), device=values.device, check_invariants=False, is_coalesced=True
        )


def _as_rows(grad: torch.Tensor) -> torch.Tensor:
    """Rows are added up before they are scaled, as one process would."""
    return (grad.to_sparse(1) if grad.layout == torch.strided else grad).detach().coalesce()


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two coalesced tensors; torch's own addition knows no 16 bits on a CPU."""
    if first.sparse_dim() != second.sparse_dim():
        return (first.to_dense() + second.to_dense()).to_sparse(1)
    indices = torch.cat([first._indices(), second._indices()], dim=1)
    values = torch.cat([first._values(), second._values()])
    shape, device = tuple(first.shape), values.device
    return torch.sparse_coo_tensor(indices, values, shape, device=device, check_invariants=False).coalesce()


def _scaled(sparse: torch.Tensor, scale: Scale) -> torch.Tensor:
    """`sparse`, coalesced, times `scale`; the tensor itself is not changed, since it may be somebody's gradient."""
    if not multiplies(scale):
        return sparse
    indices, values, shape = sparse._indices(), sparse._values() * scale, tuple(sparse.shape)
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False, is_coalesced=True
    )
