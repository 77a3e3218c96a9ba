"""The hot path: what runs in Python each time autograd has accumulated a parameter's gradient.

A hook tells the reducer and returns: a state and a counter. Hooks refer to the reducer weakly, because a
parameter's hooks are invisible to the garbage collector: a strong reference would keep model, buckets and
process group alive for ever. Must not know of buckets' memory or of launching.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch.utils.hooks import RemovableHandle

from ..buckets import slot
from ..frames import untraced
from ..messages import changed_graph
from ..passes.backward import OBSERVING

if TYPE_CHECKING:
    from ..buckets.dense import DenseBucket
    from .reducer import Reducer

# One function for all parameters, bound to its arguments: a closure each would be five times the memory.
Reference: TypeAlias = "weakref.ref[Reducer]"


@untraced
def _on_gradient(reference: Reference, index: int, param: torch.Tensor) -> None:
    """The hook of parameter `index`. All the Python that runs once per parameter is in here."""
    reducer = reference()
    if reducer is None:
        return
    layout = reducer.layout
    bucket, place = layout.places[index]
    if reducer.state < OBSERVING and reducer.begin() is None:
        slot.hold(bucket.states, place)
        return
    if reducer.state is OBSERVING:
        reducer.learnt.observed.append(index)
    if not slot.arrive(bucket.states, place):
        reducer.arrived_again(index)
        return
    if layout.is_large[index]:
        reducer.under_way.large_arrived(cast("DenseBucket", bucket), place, param)
    bucket.pending -= 1
    if not bucket.pending:
        reducer.under_way.filled(bucket, param)


@untraced
def _on_last_gradient(reference: Reference, bucket_index: int, param: torch.Tensor) -> None:
    """The only hook of a bucket whose order of gradients is known: it waits for the last one."""
    reducer = reference()
    if reducer is None:
        return
    if reducer.state < OBSERVING and reducer.begin() is None:
        return
    bucket = reducer.buckets[bucket_index]
    bucket.pending -= 1
    if not bucket.pending:
        reducer.under_way.filled(bucket, param)


@untraced
def _on_device_gradient(reference: Reference, index: int, param: torch.Tensor) -> None:
    """As `_on_gradient`, of a parameter on a device: autograd has a thread and a current stream for each of those."""
    reducer = reference()
    if reducer is not None:
        with reducer.order.lock:
            reducer.streams.note(param.device)
            _on_gradient(reference, index, param)


@untraced
def _on_last_device_gradient(reference: Reference, bucket_index: int, param: torch.Tensor) -> None:
    """As `_on_last_gradient`, of a bucket on a device."""
    reducer = reference()
    if reducer is not None:
        with reducer.order.lock:
            reducer.streams.note(param.device)
            _on_last_gradient(reference, bucket_index, param)


@untraced
def _on_refused_gradient(reference: Reference, name: str, promise: str, _param: torch.Tensor) -> None:
    """The hook of a parameter that was promised to get no gradient: nobody would reduce it."""
    reducer = reference()
    if reducer is not None:
        error = changed_graph(f"{reducer.collectives.me}: step {reducer.step}", name, promise)
        reducer.collectives.board.post_error(error)
        raise error


# Hooks run in the order in which they were registered.
_OURS = (_on_gradient, _on_last_gradient, _on_device_gradient, _on_last_device_gradient)


def remove_all(handles: list[RemovableHandle]) -> None:
    """Take these hooks off, wherever they are."""
    for handle in handles:
        handle.remove()
    handles.clear()


class GradientHooks:
    """The hooks that a reducer has on its parameters."""

    def __init__(self, owner: Reducer) -> None:
        self._owner = weakref.ref(owner)
        self._handles: list[RemovableHandle] = []
        # Only so that they are there: `torch.utils.swap_tensors`, by which `Module.to` and `load_state_dict` replace
        # parameters where a user asks for that, leaves our hooks behind. It refuses what has weak references, and
        # the parameters of torch's own wrapper for other ones.
        self._unswapped: list[weakref.ref[torch.Tensor]] = []
        # Hooks of a wrapper that is gone would make the next one think that users want to see gradients (`is_final`).
        weakref.finalize(owner, remove_all, self._handles)
        self._watched: list[int] = []  # the parameters with a hook each, by identity
        self._on_device = False
        self._overtaken: list[torch.Tensor] = []  # those on which users have put hooks after ours

    def watch_all(self, params: Sequence[torch.Tensor], on_device: bool) -> None:
        """One hook on every parameter, in place of whatever there was; on the CPU one that takes no lock."""
        if list(map(id, params)) == self._watched and on_device == self._on_device:
            return
        self.detach()
        self._watched, self._on_device = list(map(id, params)), on_device
        hook = _on_device_gradient if on_device else _on_gradient
        for index, param in enumerate(params):
            self._add(param, partial(hook, self._owner, index))

    def is_final(self, param: torch.Tensor) -> bool:
        """Whether the gradient stays as it is: a user's hook that runs after ours may still read or change it."""
        hooks = param._post_accumulate_grad_hooks
        if hooks is None or len(hooks) == 1 or self._is_ours(next(reversed(hooks.values()))):
            return True
        self._overtaken.append(param)
        return False

    def stay_last(self) -> None:
        """Between two passes: put our hooks behind those that users have added.

        A hook that one rank alone has, to log a norm, would otherwise make its buckets leave later than the others', and
        meet a collective that is part of the backward.
        """
        for param in self._overtaken:
            hooks = param._post_accumulate_grad_hooks or {}
            # Those of another wrapper of the same parameter would do the same to ours.
            if all(getattr(hook, "func", None) in _OURS for hook in hooks.values()):
                continue
            for key in [key for key, hook in hooks.items() if self._is_ours(hook)]:
                hooks[key] = hooks.pop(key)
        self._overtaken.clear()

    def _is_ours(self, hook: Callable[..., object]) -> bool:
        return getattr(hook, "func", None) in _OURS and cast("partial[None]", hook).args[0] is self._owner

    def watch_last(self, param: torch.Tensor, bucket_index: int) -> None:
        """A hook on the parameter whose gradient completes the bucket."""
        hook = _on_last_device_gradient if self._on_device else _on_last_gradient
        self._add(param, partial(hook, self._owner, bucket_index))

    def refuse(self, named: Iterable[tuple[str, torch.Tensor]], promise: str) -> None:
        """From now on, a gradient for one of these parameters is an error: nobody would reduce it."""
        for name, param in named:
            self._add(param, partial(_on_refused_gradient, self._owner, name, promise))

    def detach(self) -> None:
        """Take all of them off."""
        remove_all(self._handles)
        self._watched = []
        self._unswapped.clear()

    def _add(self, param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        # A parameter that is frozen now may be unfrozen later, and would then be reduced by nobody.
        trained = param.requires_grad
        self._handles.append(param.requires_grad_(True).register_post_accumulate_grad_hook(hook))
        self._unswapped.append(weakref.ref(param))
        param.requires_grad_(trained)
