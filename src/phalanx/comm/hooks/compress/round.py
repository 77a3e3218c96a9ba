"""One bucket on its way through PowerSGD: two all-reduces, of which the second needs the first.

    M        gradient plus residual of one parameter, rows × columns
    left     M × right of the last step, averaged, made orthonormal        (rows × rank)
    right    Mᵀ × left, averaged                                           (columns × rank)
    result   left × rightᵀ

Who calls `launch_left` and `launch_right`, and when, is decided by the state: docs/design/hooks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...bucket import GradBucket
from ...collectives import Collectives, Work
from ..future import PendingFuture
from .lowrank import orthonormal


@dataclass(slots=True)
class Batch:
    """Matrices of one shape, compressed together. `sources` are views of gradient plus residual."""

    names: tuple[str, ...]
    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    right: torch.Tensor
    left: torch.Tensor = field(init=False)
    # On a device only: what `right` was at first. Holds the next step's right factors in the end.
    start: torch.Tensor | None = field(init=False, default=None)

    @property
    def stacked(self) -> torch.Tensor:
        return self.sources[0].unsqueeze(0) if len(self.sources) == 1 else torch.stack(self.sources)


@dataclass(slots=True)
class Plain:
    """A gradient that is not worth compressing: where it comes from and where its average goes."""

    source: torch.Tensor
    target: torch.Tensor


class Keeper(Protocol):
    """What outlives a round: the state."""

    orthogonalization_epsilon: float
    # Right factors to start the next step from, by parameter; kept with a warm start only.
    factors: dict[str, torch.Tensor]
    warm_start: bool

    def collectives(self) -> Collectives:
        """Whom to talk to."""

    def launch(self, half_done: Round) -> None:
        """Call `launch_right`, once, in the order that all ranks keep."""


class Round:
    """One bucket's two collectives. `future` holds the bucket's averaged buffer in the end.

    Holds no group and no state once the second collective is launched: what is referenced from a
    callback may die on the transport's own thread, and a group must not (docs/design/hooks.md).
    """

    def __init__(
        self,
        bucket: GradBucket,
        batches: Sequence[Batch],
        plain: Sequence[Plain],
        keeper: Keeper,
    ) -> None:
        self.index = bucket.index()
        self._result = bucket.buffer()
        # Where asking for a value would make the host wait, both answers are computed and the device chooses.
        self._on_device = self._result.device.type != "cpu"
        self._batches = batches
        self._plain = plain
        self._epsilon = keeper.orthogonalization_epsilon
        self._factors = keeper.factors if keeper.warm_start else {}
        self._collectives: Collectives | None = keeper.collectives()
        self.future = PendingFuture(lambda: keeper.launch(self), self._result.device)

    def launch_left(self) -> None:
        """Start the first all-reduce: what is not compressed, and the left factors."""
        for batch in self._batches:
            if self._on_device:
                batch.start = batch.right
            batch.left = torch.bmm(batch.stacked, batch.right)
        parts = [one.source for one in self._plain] + [batch.left.flatten() for batch in self._batches]
        self._first = torch.cat(parts).to(self._result.dtype)
        self._work: Work | None = _all_reduce_mean(self._collectives, self._first)

    def launch_right(self) -> None:
        """Wait for the first all-reduce and start the second, of the right factors. Updates the residuals.

        What goes wrong is raised here, since no bucket to come would fare better, and by the future.
        """
        collectives, work = self._collectives, self._work
        assert collectives is not None and work is not None, "a second half is launched once"
        self._collectives = self._work = None
        self.future.set_launched()
        try:
            collectives.wait(work, f"PowerSGD hook, bucket {self.index}, left factors")
            rest = self._unpack_plain(self._first)
            for batch in self._batches:
                rest = self._turn(batch, rest)
            self._second = torch.cat([batch.right.flatten() for batch in self._batches]).to(self._result.dtype)
            # Chained, not only told of the end: what it reads is then ordered after the sum on every kind of group.
            _all_reduce_mean(collectives, self._second).get_future().then(self._finish)
        except Exception as error:
            self.future.fail(error)
            raise

    def abandon(self, reason: Exception) -> None:
        """Give up between the two: nobody will launch the second."""
        self.future.fail(reason)

    def _unpack_plain(self, first: torch.Tensor) -> torch.Tensor:
        for one in self._plain:
            one.target.copy_(first[: one.source.numel()])
            one.source.zero_()  # sent in full: no residual
            first = first[one.source.numel() :]
        return first

    def _turn(self, batch: Batch, averaged: torch.Tensor) -> torch.Tensor:
        """From one batch's averaged left factors to its own right ones; returns what follows them."""
        count = batch.left.numel()
        left = averaged[:count].view(batch.left.shape).to(batch.left.dtype)
        finite = left.isfinite().all()
        # A factorisation of NaN is not worth asking for; NaN is what everyone gets to see.
        if self._on_device:
            batch.left = orthonormal(left.where(finite, 0.0), self._epsilon).where(finite, torch.nan)
        else:
            batch.left = orthonormal(left, self._epsilon) if finite else torch.full_like(left, torch.nan)
        # As it will travel, so that what a narrow dtype rounds away stays in the residual.
        batch.right = torch.bmm(batch.stacked.mT, batch.left).to(self._result.dtype).to(left.dtype)
        if not self._on_device:
            finite = finite and batch.right.isfinite().all()  # which a narrow dtype may have made infinite
        for nth, source in enumerate(batch.sources):
            if self._on_device or finite:
                # This rank's own share in the result, not the average: residuals then hold what
                # compression lost, without the differences between ranks, and stay small.
                source.addmm_(batch.left[nth], batch.right[nth].mT, alpha=-1.0)
            if self._on_device:
                source.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # all of it, where the factors were not finite
            elif not finite:
                source.zero_()
        return averaged[count:]

    def _finish(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()  # raises what went wrong
            rest = self._second
            for batch in self._batches:
                count = batch.right.numel()
                right = rest[:count].view(batch.right.shape).to(batch.right.dtype)
                rest = rest[count:]
                self._write(batch, right)
            self.future.finish(self._result)
        except Exception as error:
            self.future.fail(error)

    def _write(self, batch: Batch, right: torch.Tensor) -> None:
        finite = right.isfinite().all()
        if batch.start is not None:
            # This runs on a stream of the callback's own. Memory of the launching stream that it uses must not be reused
            # before it is over, and what outlives it must not be memory of this stream: the next step reads it on another.
            here = torch.accelerator.current_stream(right.device)
            for used in (batch.left, batch.start, *batch.targets):
                used.record_stream(here)
            batch.start.copy_(right.where(finite, batch.start))
        for nth, (name, target) in enumerate(zip(batch.names, batch.targets, strict=True)):
            if batch.start is not None:
                self._factors[name] = batch.start[nth]
            elif finite:
                self._factors[name] = right[nth]
            else:
                self._factors.pop(name, None)
            if target.dtype == right.dtype:
                torch.mm(batch.left[nth], right[nth].mT, out=target)
            else:
                target.copy_(batch.left[nth] @ right[nth].mT)


def _all_reduce_mean(collectives: Collectives | None, tensor: torch.Tensor) -> Work:
    assert collectives is not None, "a round has its group until its second half is launched"
    return collectives.all_reduce(tensor, scale=1.0 / collectives.world)
