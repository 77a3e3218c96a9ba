"""The hot path: what runs in Python each time autograd has accumulated a parameter's gradient.

A hook tells the reducer and returns: two flags and a counter. Hooks refer to the reducer weakly, because a
parameter's hooks are invisible to the garbage collector: a strong reference would keep model, buckets and
process group alive for ever. Must not know of buckets' memory or of launching.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from .frames import untraced
from .verdicts import changed_graph

if TYPE_CHECKING:
    from .reducer import Reducer

# The id of the running backward pass, -1 outside. Private, but the only way to tell a nested backward
# (reentrant checkpointing) from its parent; tests/ddp/test_torch_internals.py notices if it moves.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


class Phase(enum.Enum):
    """Whether gradients that arrive now belong to a backward that is reduced."""

    IDLE = enum.auto()
    REDUCING = enum.auto()


def is_final(param: torch.Tensor) -> bool:
    """Whether the gradient stays as it is: a user's hook that runs after ours may still change it."""
    hooks = param._post_accumulate_grad_hooks
    return hooks is None or len(hooks) == 1


class GradientHooks:
    """The hooks that a reducer has on its parameters."""

    def __init__(self, owner: Reducer) -> None:
        self._owner = weakref.ref(owner)
        self._handles: list[RemovableHandle] = []

    def watch_all(self, params: Iterable[torch.Tensor]) -> None:
        """One hook on every parameter, in place of whatever there was."""
        self.detach()
        for index, param in enumerate(params):
            self._add(param, gradient_hook(self._reducer(), index))

    def watch_last(self, param: torch.Tensor, bucket_index: int) -> None:
        """A hook on the parameter whose gradient completes the bucket."""
        self._add(param, last_gradient_hook(self._reducer(), bucket_index))

    def refuse(self, named: Iterable[tuple[str, torch.Tensor]], promise: str) -> None:
        """From now on, a gradient for one of these parameters is an error: nobody would reduce it."""
        for name, param in named:
            self._add(param, refusing_hook(self._reducer(), name, promise))

    def detach(self) -> None:
        """Take all of them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _add(self, param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _reducer(self) -> Reducer:
        reducer = self._owner()
        assert reducer is not None, "only the reducer itself changes its hooks"
        return reducer


def gradient_hook(owner: Reducer, index: int) -> Callable[[torch.Tensor], None]:
    """The hook of parameter `index`. All the Python that runs once a parameter is in here."""
    reference = weakref.ref(owner)
    place = owner.place_of[index]

    def on_gradient(param: torch.Tensor) -> None:
        reducer = reference()
        if reducer is None:
            return
        arrivals = reducer.arrivals
        if reducer.phase is Phase.IDLE:
            if not reducer.armed:
                arrivals.carried[index] = 1
                return
            reducer.begin()
        if arrivals.observing:
            arrivals.sequence.append(index)
        bucket = reducer.bucket_of[index]
        if arrivals.fired[index]:
            arrivals.again(index, bucket, reducer.options.as_views)
            return
        arrivals.fired[index] = 1
        if arrivals.often[index] or current_backward() != reducer.task:
            # A nested backward may bring this parameter more gradient later in the same pass.
            bucket.held = arrivals.nested = True
        elif bucket.large[place]:
            reducer.large_arrived(bucket, place, param)
        bucket.pending -= 1
        if not bucket.pending:
            reducer.filled(bucket, param)

    return untraced(on_gradient)


def last_gradient_hook(owner: Reducer, bucket_index: int) -> Callable[[torch.Tensor], None]:
    """The only hook of a bucket whose order of gradients is known: it waits for the last one."""
    reference = weakref.ref(owner)

    def on_last_gradient(param: torch.Tensor) -> None:
        reducer = reference()
        if reducer is None:
            return
        if reducer.phase is Phase.IDLE:
            if not reducer.armed:
                return
            reducer.begin()
        bucket = reducer.buckets[bucket_index]
        bucket.pending -= 1
        if not bucket.pending:
            reducer.filled(bucket, param)

    return untraced(on_last_gradient)


def refusing_hook(owner: Reducer, name: str, promise: str) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter that was promised to get no gradient: nobody would reduce it."""
    reference = weakref.ref(owner)

    def on_gradient(_param: torch.Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            error = changed_graph(f"rank {reducer.collectives.rank}: step {reducer.step}", name, promise)
            reducer.patience.board.post_error(error)
            raise error

    return untraced(on_gradient)
