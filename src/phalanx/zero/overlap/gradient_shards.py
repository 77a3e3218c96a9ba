"""This rank's shards of the gradients: which memory they are in, and whose they are.

A parameter whose `.grad` is a `ScatteredGradient` has its mean here, in slices; one whose `.grad` is None has none,
whatever the memory holds. What a user did not zero is kept and added to the next mean, as `.grad` would.

To read a scattered gradient as a whole one would be wrong without notice, so anything that tries gets an error that says
what to use instead. Allowed is what has an exact meaning on slices: zeroing, accumulating another backward's gradient
until that is reduced too, and a GradScaler's unscaling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...ddp.buckets.bucket import Bucket
from ...ddp.buckets.dense import DenseBucket
from ...errors import ReductionError
from ...plan.params import gradient_dtype
from ..partition.shard import LiveSlice, Shard
from ..state.sharded_optimizer import ShardedOptimizer
from .reduce_scatter import ReduceScatter

_aten = torch.ops.aten

# No optimizer has a state of this name.
_SET_ASIDE = "gradient between two partitions"


class GradientShards:
    """The gradients of the shards of one plan, in the memory of `buckets` or apart from it."""

    def __init__(
        self, sharded: ShardedOptimizer, shards: Sequence[Shard], buckets: Sequence[DenseBucket], scatter: ReduceScatter
    ) -> None:
        self._sharded = sharded
        self._shards = shards
        self._scatter = scatter
        self._gradients: list[list[torch.Tensor]] = []
        self._slices: dict[int, list[tuple[LiveSlice, torch.Tensor]]] = {}
        for shard, bucket in zip(shards, buckets, strict=True):
            memory, origin = scatter.own_memory(bucket)
            gradients = [_view(live, shard, memory, origin) for live in shard.slices]
            self._gradients.append(gradients)
            for live, gradient in zip(shard.slices, gradients, strict=True):
                self._slices.setdefault(live.index, []).append((live, gradient))
        params = sharded.table.params
        index_of = sharded.table.index_of
        self._numbers = [[index_of[param] for param in bucket.params] for bucket in buckets]
        trained = [number for numbers in self._numbers for number in numbers]
        self._markers = {number: ScatteredGradient(params[number], number, self) for number in trained}
        # By bucket, of the pass under way: which of its parameters have a mean now.
        self._given: dict[int, list[int]] = {}
        # By parameter: the mean that the next one is added to; None for one that the user has zeroed.
        self._accumulated: dict[int, list[torch.Tensor] | None] = {}

    @property
    def forgets(self) -> bool:
        """Whether slices are gone as soon as they have been used."""
        return self._scatter.forgets

    # -- a backward ----------------------------------------------------------------------------

    @property
    def has_means(self) -> bool:
        """Whether a parameter still has the mean of an earlier backward, which the user has not zeroed."""
        grads = (self._sharded.table.params[number].grad for number in self._markers)
        return any(isinstance(grad, ScatteredGradient) and not grad.is_zero for grad in grads)

    def begin(self, joined: bool) -> None:
        """A pass begins: local gradient takes the place of markers, and means that are still there are kept."""
        if self.forgets and not joined and self.has_means:
            raise ReductionError(
                "parameters still have the gradient of the last step, which stage=2 has freed, so that another cannot be "
                "added to it. Call zero_grad() before each step's backward."
            )
        if not joined:
            self._take_over()
        earlier, self._accumulated = self._accumulated, {}
        for number, marker in self._markers.items():
            if not take_pending(self._sharded.table.params[number]) or joined:
                continue
            if marker.is_zero:
                self._accumulated[number] = None
            else:
                # Of a pass that failed, they have been kept before, and their memory holds something else by now.
                kept = earlier.get(number)
                self._accumulated[number] = kept or [gradient.clone() for _, gradient in self._slices.get(number, ())]

    def give_up(self) -> None:
        """The pass failed: means that were to be added to its own are gradients again, for the next.

        What is in `.grad` now, no pass has reduced; it is what has been added to them.
        """
        self._given = {}
        for number in self._accumulated:
            param, marker = self._sharded.table.params[number], self._markers[number]
            if param.grad is not marker:
                marker.pending, param.grad = param.grad, marker

    def receive(self, bucket: DenseBucket, wanted: Sequence[int] | None) -> None:
        """The mean is there: give it to the slices of parameters that any rank used, and mark those."""
        again = bucket.index in self._given  # with a late part, which was added to what lies here already
        numbers = self._numbers[bucket.index]
        given = [1] * len(numbers)
        for place, number in enumerate(numbers):
            used = wanted is None or wanted[place] > 0
            # Not taken out before the pass has ended: until then it may fail, and this is the only copy of the mean.
            accumulates = number in self._accumulated
            accumulated = None if again else self._accumulated.get(number)
            given[place] = int(used or accumulates)
            for k, (live, gradient) in enumerate(self._slices.get(number, ())):
                if accumulated is not None:
                    gradient.add_(accumulated[k]) if used else gradient.copy_(accumulated[k])
                live.tensor.grad = gradient if given[place] else None
            marker = self._markers[number]
            # Of a marker that the user has replaced by None, what had been added to it belongs to nobody.
            marker.is_zero, marker.pending = False, None
        bucket.mark_scattered()
        self._given[bucket.index] = given

    def mark_given(self, buckets: Sequence[Bucket]) -> None:
        """A pass has ended: markers stand for the means that it brought."""
        for index, given in self._given.items():
            bucket = buckets[index]
            assert isinstance(bucket, DenseBucket), "only dense gradients are scattered"
            bucket.give_markers(given, [self._markers[number] for number in self._numbers[index]])
        self._given = {}
        self._accumulated = {}

    def absorb(self) -> None:
        """After a backward that left whole means: keep the own slices, where there is memory for them, and mark the rest."""
        if self.forgets:
            return
        for shard, gradients in zip(self._shards, self._gradients, strict=True):
            shard.take_gradients()
            for live, gradient in zip(shard.slices, gradients, strict=True):
                if live.tensor.grad is not None:
                    gradient.copy_(live.tensor.grad)
            shard.drop_gradients()
        self.mark_all()

    def mark_all(self) -> None:
        """Free whatever whole gradients there are: each rank has its slices, or has used them."""
        for number, marker in self._markers.items():
            param = self._sharded.table.params[number]
            if param.grad is not None and param.grad is not marker:
                param.grad = marker
                marker.is_zero = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """In the midst of a pass, have markers stand for all gradients, which refuse to be read; afterwards as before."""
        params = self._sharded.table.params
        held = {number: params[number].grad for number in self._markers}
        for number, marker in self._markers.items():
            params[number].grad = marker
        try:
            yield
        finally:
            for number, grad in held.items():
                params[number].grad = grad

    # -- another partition ---------------------------------------------------------------------

    def set_aside(self) -> None:
        """Before another partition is made: let the means travel with the optimizer's state."""
        if self._scatter.forgets:
            return
        params, state = self._sharded.table.params, self._sharded.optim.state
        for number in self._markers:
            if isinstance(params[number].grad, ScatteredGradient):
                for live, gradient in self._slices.get(number, ()):
                    state[live.tensor][_SET_ASIDE] = gradient

    def restore(self) -> None:
        """Afterwards, in the shards of the new partition: take the means out of the state again."""
        params, state = self._sharded.table.params, self._sharded.optim.state
        for number in self._markers:
            old = params[number].grad
            if isinstance(old, ScatteredGradient) and old.optimizer() is self._sharded:
                self._take_place(number, old)
            for live, gradient in self._slices.get(number, ()):
                mine = state.get(live.tensor)
                if mine is not None and _SET_ASIDE in mine:
                    gradient.copy_(mine.pop(_SET_ASIDE))
                    if not mine:
                        del state[live.tensor]

    # -- afterwards ----------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Gradients that another optimizer has scattered and the user has zeroed are zeros here, too. Refuse all others."""
        for number, marker in self._markers.items():
            held = self._sharded.table.params[number].grad
            if held is marker or not isinstance(held, ScatteredGradient):
                continue
            # The slices here hold something else: to go on by them would be to lose that mean without a word.
            if not held.is_zero:
                raise ReductionError(
                    f"the gradient of {self._sharded.table.names[number]} is in slices of another ZeroRedundancyOptimizer, "
                    "which worked for this wrapper before. Step by that one before making another, and call zero_grad()."
                )
            self._take_place(number, held)
            self.zero_slices([number])

    def _take_place(self, number: int, held: ScatteredGradient) -> None:
        marker = self._markers[number]
        marker.pending, marker.is_zero = held.pending, held.is_zero
        self._sharded.table.params[number].grad = marker

    def arm(self) -> None:
        """Before a step apart from backward: give slices the gradients that the parameters still have."""
        self._take_over()
        for number in self._markers:
            grad = self._sharded.table.params[number].grad
            if grad is not None and (not isinstance(grad, ScatteredGradient) or grad.pending is not None):
                raise ReductionError(
                    f"{self._sharded.table.names[number]} has a gradient that no backward has reduced. Run the last "
                    "backward of each step outside no_sync(), and leave `.grad` alone."
                )
            for live, gradient in self._slices.get(number, ()):
                live.tensor.grad = None if grad is None else gradient

    def first_changed(self) -> torch.Tensor | None:
        """A parameter whose gradient was replaced, or added to, since it was given out; not if it was freed."""
        params = self._sharded.table.params
        for number, marker in self._markers.items():
            grad = params[number].grad
            if grad is marker and marker.pending is None:
                continue  # asked after every step, of every parameter: the usual case first
            if grad is not None and not (isinstance(grad, ScatteredGradient) and grad.pending is None):
                return params[number]
        return None

    def owned(self) -> list[torch.Tensor]:
        """The owned slices of all gradients that there are."""
        self._take_over()
        params = self._sharded.table.params
        return [
            live.owned(gradient)
            for number, pairs in self._slices.items()
            if isinstance(params[number].grad, ScatteredGradient)
            for live, gradient in pairs
        ]

    def zero_slices(self, numbers: Sequence[int]) -> None:
        """Set the slices of these parameters to zero."""
        for number in numbers:
            for _, gradient in self._slices.get(number, ()):
                gradient.zero_()

    def unscale_slices(self, numbers: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """What a GradScaler does, on slices; every rank hears if one of them found an infinite number."""
        if self._scatter.used_at_once:
            raise ReductionError(
                "the gradients were used during backward, before they could be unscaled. Make the optimizer with "
                "step_in_backward=False to use a GradScaler."
            )
        slices = [live.owned(grad) for number in numbers for live, grad in self._slices.get(number, ())]
        if slices:
            torch._amp_foreach_non_finite_check_and_unscale_(slices, found_inf, inverse_scale)
        work = self._sharded.collectives.all_reduce(found_inf)
        self._sharded.collectives.wait(work, "asking whether any gradient is infinite")


def _view(live: LiveSlice, shard: Shard, memory: torch.Tensor, origin: int) -> torch.Tensor:
    offset = shard.offset_of[live.bounds.param] - origin
    return live.shaped(memory[offset + live.bounds.begin : offset + live.bounds.end])


# -- what stands in `.grad` ------------------------------------------------------------------------


class ScatteredGradient(torch.Tensor):
    """Stands in `param.grad`. Has the shape of the parameter and no memory. `pending` is local gradient not reduced yet.

    `is_zero`: the user has zeroed it since it was given out. `keeper` has the slices, and is another one with each
    partition of the same `optimizer`.
    """

    number: int
    pending: torch.Tensor | None
    is_zero: bool
    keeper: weakref.ref[GradientShards]
    optimizer: weakref.ref[ShardedOptimizer]

    @staticmethod
    def __new__(cls, param: torch.Tensor, number: int, keeper: GradientShards) -> ScatteredGradient:
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=gradient_dtype(param), device=param.device
        )
        made.number = number
        made.pending = None
        made.is_zero = False
        made.keeper, made.optimizer = weakref.ref(keeper), weakref.ref(keeper._sharded)
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
        if func is _aten.add_.Tensor and isinstance(first, cls) and not kwargs and _is_like(args[1], first):
            # Autograd adds the gradient of a further backward. Users who add something else get the error below.
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


def _is_like(value: Any, marker: ScatteredGradient) -> bool:
    """Whether `value` is a whole gradient of the marker's parameter: not a number, nor something that is broadcast."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, ScatteredGradient)
    return is_whole and value.shape == marker.shape


def _keeper(markers: Sequence[Any]) -> GradientShards:
    if not all(isinstance(marker, ScatteredGradient) for marker in markers):
        raise ReductionError("whole and scattered gradients were given together. Call zero_grad() in between.")
    keeper = markers[0].keeper()
    if keeper is None:
        raise ReductionError("the optimizer that scattered this gradient is gone. Call model.zero_grad().")
    found: GradientShards = keeper
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
