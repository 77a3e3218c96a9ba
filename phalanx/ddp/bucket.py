"""A bucket of the plan with memory behind it: gradients are packed in, reduced, and unpacked.

    stage      `.grad` of its parameters                     `body`
    FILLING    local gradients, arriving one by one          free
    LAUNCHED   local gradients (views: the memory in flight) in flight, owned by the transport
    REDUCED    local gradients (views: the mean)             the mean
    GIVEN      the mean, after `unpack`                      free, or lent out as `.grad`

A large gradient that was packed on arrival and then lent is a view from that moment on, as in view mode.

Owns its memory. Must not know when to launch, nor of other buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from ..comm.bucket import GradBucket
from ..comm.collectives import Work
from ..comm.sparse import SparseSum
from ..plan import Bucket, ParamSpec
from .bucket_memory import BucketMemory
from .lending import is_just_made, is_private
from .tail import Tail

# From this size on, a fused copy-and-scale of its own beats an extra pass over memory.
_LARGE_BYTES = 64 * 1024


class Stage(enum.Enum):
    FILLING = enum.auto()
    LAUNCHED = enum.auto()
    REDUCED = enum.auto()
    GIVEN = enum.auto()


class LiveBucket:
    """One bucket's memory, parameters and progress through a backward pass."""

    def __init__(
        self,
        bucket: Bucket,
        specs: Sequence[ParamSpec],
        params: Sequence[torch.nn.Parameter],
        allocate: Callable[[int, int, torch.dtype, torch.device], torch.Tensor],
        tail: Tail,
        tail_rides: bool,
    ) -> None:
        self.index = bucket.index
        self.is_last = False  # in the plan; and among the dense ones, which hooks see
        self.is_last_dense = False
        self.slots = bucket.slots
        self.sparse = bucket.sparse
        self.params = [params[slot.param] for slot in bucket.slots]
        self.names = [specs[slot.param].name for slot in bucket.slots]
        self.tail = tail
        self.tail_rides = tail_rides
        self._dtype = bucket.dtype
        self._specs = [specs[slot.param] for slot in bucket.slots]
        self._allocate = allocate
        self._memory: BucketMemory | None = None
        self.grad_bucket: GradBucket | None = None
        item = bucket.dtype.itemsize
        # A large gradient goes into the body as soon as it arrives, while it is still in the cache; small
        # ones together when the bucket is full, because each operation costs more than moving them does.
        self.large = bytearray(slot.numel * item >= _LARGE_BYTES and not bucket.sparse for slot in self.slots)
        self.packed = bytearray(len(self.slots))
        self.lent = bytearray(len(self.slots))  # whose gradient is a view of the body, in this pass
        self.num_bytes = bucket.num_bytes
        self.stage = Stage.FILLING
        # How many gradients have to arrive before the bucket is full, and how many still do.
        self.expected = len(self.slots)
        self.pending = self.expected
        self.held = False
        self.lends = True  # whether means may be given out as memory in place of copies
        self.work: Work | None = None
        self.tail_work: Work | None = None
        self.future: torch.futures.Future[Any] | None = None
        self.sparse_grad: torch.Tensor | None = None
        self.rows: SparseSum | None = None  # of a sparse bucket
        self.kept: dict[int, torch.Tensor] = {}

    # -- memory --------------------------------------------------------------------------------

    @property
    def memory(self) -> BucketMemory:
        """Taken when it is first needed: gradients of an earlier plan may hold theirs until then."""
        return self.take_memory() if self._memory is None else self._memory

    def take_memory(self) -> BucketMemory:
        """Take new memory; what there was stays with those who hold it."""
        tail_numel = self.tail.numel if self.tail_rides and not self.sparse else 0
        slots = () if self.sparse else self.slots
        numel = sum(slot.numel for slot in slots)
        flat = self._allocate(self.index, numel + tail_numel, self._dtype, self.params[0].device)
        taken = self._memory = BucketMemory(flat, slots, self._specs, tail_numel)
        if not tail_numel:
            taken.tail = torch.zeros(self.tail.numel, dtype=torch.float32, device=flat.device)
        self.grad_bucket = None
        return taken

    @property
    def flat(self) -> torch.Tensor:
        """Everything that travels: the body, and a tail that rides."""
        return self.memory.flat

    @property
    def body(self) -> torch.Tensor:
        """The gradients, one after the other."""
        return self.memory.body

    @property
    def views(self) -> list[torch.Tensor]:
        """The gradients in the body, each in its parameter's shape and strides."""
        return self.memory.views

    @property
    def tail_data(self) -> torch.Tensor:
        return self.memory.tail

    def place_of(self, param: int) -> int:
        """Where among the slots the parameter is."""
        return self._places[param]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {slot.param: i for i, slot in enumerate(self.slots)}

    def reclaim(self) -> None:
        """Before a backward: what is still out as someone's gradient stays theirs, and other memory is taken."""
        if self._memory is not None and self._memory.is_out:
            if self._memory.is_held:
                self._memory = None
            else:
                self._memory.is_out = False

    def rearm(self) -> None:
        """Ready for the next backward pass; frees what the last one held."""
        self.stage = Stage.FILLING
        self.pending = self.expected
        self.held = False
        self.packed[:] = bytes(len(self.packed))
        self.lent[:] = bytes(len(self.lent))
        self.work = self.tail_work = self.future = self.sparse_grad = None
        self.kept.clear()

    # -- in ------------------------------------------------------------------------------------

    def pack(self, scale: float, as_views: bool) -> bool:
        """Bring every local gradient, times `scale`, into the body; false if a parameter has none after all."""
        # Every parameter is ready here. Nearly always that means it has a gradient; autograd can also call
        # one ready with an undefined gradient, which is looked for only once something goes wrong.
        grads = cast("list[torch.Tensor]", [param.grad for param in self.params])
        try:
            self._move_in(grads, scale, as_views)
        except (AttributeError, TypeError, RuntimeError):
            if any(grad is None for grad in grads):
                return False
            # A sparse gradient where the plan expects a dense one: rare, and right this way too.
            if not any(grad.layout != torch.strided for grad in grads):
                raise
            self._move_in([self._densify(i) for i in range(len(grads))], scale, as_views)
        return True

    def pack_one(self, i: int, scale: float, as_views: bool) -> None:
        """Bring the i-th gradient into the body, ahead of the others."""
        param, view = self.params[i], self.views[i]
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            return
        if scale != 1.0:
            torch.mul(grad, scale, out=view)
        elif grad is not view:
            view.copy_(grad)
        if as_views and grad is not view:
            param.grad = view
        self.packed[i] = 1

    def lend_arrived(self, i: int) -> None:
        """In the hook of the i-th gradient, which is packed: free what autograd made, if nobody sees that."""
        param = self.params[i]
        if self.packed[i] and param.dtype == self._dtype and (is_just_made(param) or is_private(param)):
            self._lend(i)

    def lend_packed(self, used: Sequence[int] | None) -> None:
        """As `lend_arrived`, for every large gradient of a bucket that is packed whole.

        Not for a parameter outside `used` (None for all): if no other rank used it, its gradient stays as it is.
        """
        for i, large in enumerate(self.large):
            param = self.params[i]
            lendable = large and not self.lent[i] and (used is None or used[i]) and param.dtype == self._dtype
            if lendable and is_private(param):
                self._lend(i)

    def write_tail(self, step: int, used: bytearray | list[int] | None, weight: float | None) -> None:
        """What this rank has to say beside its gradients; None for what is as usual."""
        self.tail.write(self.tail_data, step)
        if used is not None:
            self.tail.write_usage(self.tail_data, used)
        if weight is not None:
            self.tail.write_weight(self.tail_data, weight)

    def with_gradient(self, used: Sequence[int] | None) -> list[int]:
        """`used` (None for all) without the parameters that have no gradient."""
        return [int(param.grad is not None and (used is None or used[i])) for i, param in enumerate(self.params)]

    def pack_some(self, scale: float, as_views: bool, used: Sequence[int]) -> None:
        """As `pack`, where parameters may lack a gradient: they contribute what they hold, or zero.

        In view mode the gradient of an unused parameter is itself part of the body, so it is kept
        aside until it is known whether another rank used it.
        """
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is not None and grad.layout != torch.strided:
                grad = self._densify(i)
            if as_views and not used[i] and grad is not None:
                self.kept[i] = grad.detach().clone()
            if grad is None:
                view.zero_()
            elif not self.packed[i]:
                torch.mul(grad, scale, out=view)
            if as_views and used[i]:
                param.grad = view

    def _densify(self, i: int) -> torch.Tensor:
        grad = self.params[i].grad
        assert grad is not None, "only gradients that exist are made dense"
        if grad.layout != torch.strided:
            grad = self.params[i].grad = grad.to_dense()
        return grad

    def _move_in(self, grads: list[torch.Tensor], scale: float, as_views: bool) -> None:
        """Everything that is not packed yet, by one operation over all views and one to scale them."""
        rest = [i for i, done in enumerate(self.packed) if not done]
        views = self.views
        moved = [i for i in rest if not (as_views and _same(grads[i], views[i]))]
        if moved:
            torch._foreach_copy_([views[i] for i in moved], [grads[i] for i in moved])
        if scale != 1.0 and len(rest) == len(grads):
            self.body.mul_(scale)
        elif scale != 1.0 and rest:
            torch._foreach_mul_([views[i] for i in rest], scale)
        if as_views:
            for i in rest:
                if grads[i] is not views[i]:
                    self.params[i].grad = views[i]

    # -- out -----------------------------------------------------------------------------------

    def unpack(self, as_views: bool) -> None:
        """Give every parameter the mean as its gradient."""
        if as_views:
            for param, view in zip(self.params, self.views, strict=True):
                if param.grad is not view:
                    param.grad = view
            return
        copied = [i for i, large in enumerate(self.large) if not (large and (self.lent[i] or self._lend_mean(i)))]
        if copied:
            grads = cast("list[torch.Tensor]", [self.params[i].grad for i in copied])
            views = self.views
            torch._foreach_copy_(grads, [views[i] for i in copied])

    def _lend_mean(self, i: int) -> bool:
        """Lend the i-th mean, if nobody can tell it from the gradient that autograd made."""
        if not (self.lends and is_private(self.params[i])):
            return False
        self._lend(i)
        return True

    def _lend(self, i: int) -> None:
        # A tensor of its own, so that references to it count.
        self.params[i].grad = self.views[i].detach()
        self.lent[i] = 1
        self.memory.is_out = True

    def unpack_some(self, as_views: bool, wanted: Sequence[int]) -> None:
        """As `unpack`, leaving alone the parameters that no rank used and making gradients where missing."""
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            if not wanted[i]:
                if i in self.kept:
                    view.copy_(self.kept[i])
            elif as_views:
                param.grad = view
            elif self.lent[i]:
                continue
            elif param.grad is None:
                param.grad = torch.empty_like(param, requires_grad=False).copy_(view)
            else:
                param.grad.detach().copy_(view)


def _same(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether both name the same memory in the same layout (autograd may hand out a new tensor object)."""
    return (
        grad.layout == torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.stride() == view.stride()
        and grad.numel() > 0
    )
