"""How a packed bucket becomes a mean: by all-reduce, or by what a registered hook does.

The reducer decides when; a `Reduction` decides how. `launch` starts, `finish` waits; between the two the
bucket's body belongs to the transport. To reduce in another way (scatter, quantise, step at once), write
another `Reduction` and give it to the reducer: nothing else changes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.bucket import GradBucket
from ..comm.collectives import Collectives
from ..comm.hooks import hook_future, hook_result, launch_pending
from ..comm.sparse import SparseSum
from .bucket import LiveBucket

_ALIGNED_ELEMENTS = 64

Hook = Callable[[Any, GradBucket], torch.futures.Future[Any]]


class Reduction(abc.ABC):
    """A way to reduce buckets. `tail_rides`: the tail may lie behind the body in the same collective."""

    tail_rides: bool = True
    supports_views: bool = True
    # How many buckets may be under way before the oldest is given out in the midst of backward; None: none is.
    lag: int | None = None
    # Whether a gradient may go into the body as soon as it arrives, before the bucket is launched.
    packs_early: bool = True
    # Whether what was packed on arrival may stand in for the gradient before it is reduced.
    lends_early: bool = False
    name: str | None = None  # of a registered hook

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    @property
    @abc.abstractmethod
    def pack_scale(self) -> float:
        """What every gradient is multiplied with on its way into the body."""

    @property
    def transport_scale(self) -> float:
        """What the transport multiplies the sum of a riding tail with."""
        return 1.0

    def allocate(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for bucket `index`: zeroed, flat, of at least `numel` elements."""
        return self.collectives.allocate(numel, dtype, device)

    def begin(self, shadow: bool) -> None:  # noqa: B027 (most have nothing to do)
        """A backward that is to be reduced starts; with `shadow`, only on other ranks."""

    def packed(self, bucket: LiveBucket, place: int) -> None:  # noqa: B027 (most have nothing to do)
        """A gradient has gone into the body ahead of the others."""

    @abc.abstractmethod
    def launch(self, bucket: LiveBucket) -> None:
        """Start the reduction of a dense, packed bucket."""

    @abc.abstractmethod
    def finish(self, bucket: LiveBucket, where: str) -> None:
        """Return when the body holds the mean."""

    def give_out(self, bucket: LiveBucket, factor: float, usage: Sequence[int] | None, as_views: bool) -> None:
        """Hand out the mean, times `factor`; `usage` counts ranks by parameter where not all used all."""
        if factor != 1.0:
            bucket.body.mul_(factor)
        if usage is None:
            bucket.unpack(as_views)
        else:
            bucket.unpack_some(as_views, usage)

    def check_late(self, where: str, buckets: Sequence[LiveBucket]) -> None:  # noqa: B027 (most can)
        """Raise if buckets that some rank sent too early cannot be reduced again."""

    def launch_tail(self, bucket: LiveBucket) -> None:
        """Send a tail that could not ride along; matched on every rank by `finish_tail`."""
        if not bucket.tail_rides:
            bucket.tail_work = self.collectives.all_reduce(bucket.tail_data)

    def finish_tail(self, bucket: LiveBucket, where: str) -> None:
        if bucket.tail_work is not None:
            self.collectives.wait(bucket.tail_work, where)

    @property
    def sparse_scale(self) -> float:
        """What a sparse gradient is multiplied with before it is launched."""
        return 1.0 / self.collectives.world

    def launch_sparse(self, bucket: LiveBucket) -> None:
        """Start the sum of a sparse gradient; a tail that rides goes with it."""
        grad = bucket.sparse_grad
        assert grad is not None, "a sparse bucket is packed before it is launched"
        facts = _riding_tail(bucket)
        if bucket.rows is None:
            bucket.rows = SparseSum(self.collectives, grad.shape, grad.dtype, grad.device, facts.numel())
        bucket.work = bucket.rows.start(grad, facts)

    def settle_sparse(self, bucket: LiveBucket, where: str) -> None:
        """Once everything is launched: what a sparse sum could not say in one collective goes in a second."""
        if bucket.rows is not None and bucket.work is not None:
            bucket.work = bucket.rows.settle(bucket.work, lambda work: self.collectives.wait(work, where))

    def finish_sparse(self, bucket: LiveBucket, where: str) -> None:
        """Return when `sparse_grad` holds the mean."""
        assert bucket.work is not None and bucket.rows is not None, "a bucket is launched before it is waited for"
        facts = _riding_tail(bucket)
        bucket.sparse_grad = bucket.rows.finish(bucket.work, lambda work: self.collectives.wait(work, where), facts)

    def abandon(self, bucket: LiveBucket, where: str) -> None:
        """Return when the transport has let go of a bucket that nobody wants any more."""
        if not bucket.sparse:
            self.finish(bucket, where)
        elif bucket.rows is None:
            self.finish_sparse(bucket, where)
        elif bucket.work is not None:
            # Only what is under way: a second collective would meet nobody's.
            self.collectives.wait(bucket.work, where)
        self.finish_tail(bucket, where)


class Mean(Reduction):
    """The mean by a collective that adds, with the division where it costs least: in the transport, or while packing."""

    @property
    def pack_scale(self) -> float:
        return 1.0 if self.collectives.fuses_scale else 1.0 / self.collectives.world

    @property
    def transport_scale(self) -> float:
        return 1.0 / self.collectives.world if self.collectives.fuses_scale else 1.0

    def finish(self, bucket: LiveBucket, where: str) -> None:
        assert bucket.work is not None, "a bucket is launched before it is waited for"
        self.collectives.wait(bucket.work, where)


class AllReduce(Mean):
    """The mean by one all-reduce a bucket, tail included."""

    lends_early = True

    def allocate(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Rounded up so that each rank's share starts on a cache line: transports move aligned memory faster."""
        unit = _ALIGNED_ELEMENTS * self.collectives.world
        return self.collectives.allocate(-(-numel // unit) * unit, dtype, device)

    def launch(self, bucket: LiveBucket) -> None:
        bucket.work = self.collectives.all_reduce(bucket.flat, self.transport_scale)


class HookReduction(Reduction):
    """The mean as a user's communication hook makes it; the hook sees gradients only, unscaled."""

    tail_rides = False

    def __init__(self, collectives: Collectives, state: object, hook: Hook) -> None:
        super().__init__(collectives)
        self.state = state
        self.hook = hook
        self.name = getattr(hook, "__qualname__", type(hook).__name__)

    @property
    def pack_scale(self) -> float:
        return 1.0

    @property
    def sparse_scale(self) -> float:
        return 1.0

    def launch(self, bucket: LiveBucket) -> None:
        if bucket.grad_bucket is None:
            bucket.grad_bucket = _shown(bucket, bucket.body, bucket.views)
        else:
            bucket.grad_bucket.reset()
        self._call(bucket, bucket.grad_bucket)

    def launch_sparse(self, bucket: LiveBucket) -> None:
        assert bucket.sparse_grad is not None, "a sparse bucket is packed before it is launched"
        bucket.grad_bucket = _shown(bucket, bucket.sparse_grad, [bucket.sparse_grad])
        self._call(bucket, bucket.grad_bucket)

    def _call(self, bucket: LiveBucket, seen: GradBucket) -> None:
        bucket.future = hook_future(self.hook(self.state, seen), seen)

    def finish(self, bucket: LiveBucket, where: str) -> None:
        result = self._result(bucket, where)
        if result.data_ptr() != bucket.body.data_ptr():
            bucket.body.copy_(result)

    def finish_sparse(self, bucket: LiveBucket, where: str) -> None:
        bucket.sparse_grad = self._result(bucket, where)

    def _result(self, bucket: LiveBucket, where: str) -> torch.Tensor:
        assert bucket.future is not None and bucket.grad_bucket is not None, "launched before waited for"
        launch_pending(bucket.future)
        value = self.collectives.wait_future(bucket.future, f"{where}, hook {self.name}")
        return hook_result(value, bucket.grad_bucket)


def _riding_tail(bucket: LiveBucket) -> torch.Tensor:
    return bucket.tail_data if bucket.tail_rides else bucket.tail_data[:0]


def _shown(bucket: LiveBucket, buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> GradBucket:
    """The bucket as a hook sees it."""
    return GradBucket(
        index=bucket.index,
        buffer=buffer,
        gradients=gradients,
        parameters=bucket.params,
        is_last=bucket.is_last_dense,
        names=bucket.names,
    )
