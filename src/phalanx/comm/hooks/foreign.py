"""Hooks written for torch that need care on transports which match collectives by order, as gloo does.

Torch's PowerSGD and quantisation hooks launch a second collective from a callback of the first. With
two buckets under way, the callbacks of one rank may run before the other bucket was launched and
those of another rank after it: the ranks then add up unrelated numbers, or wait for each other for
ever. Such hooks are run one bucket at a time, in the thread that calls them. docs/design/hooks.md has
the whole story.

Hooks are known by their names: torch's module is what phalanx replaces, and is not imported.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..bucket import GradBucket
from .blocking import BlockingGroup
from .contract import Hook, check_callable
from .group import collectives_from

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_CHAINING = {
    (_TORCH_HOOKS + "powerSGD_hook", "powerSGD_hook"),
    (_TORCH_HOOKS + "powerSGD_hook", "batched_powerSGD_hook"),
    (_TORCH_HOOKS + "quantization_hooks", "quantization_pertensor_hook"),
    (_TORCH_HOOKS + "quantization_hooks", "quantization_perchannel_hook"),
}
_OPTIMIZING = _TORCH_HOOKS + "optimizer_overlap_hooks"


def adopt_hook(hook: Hook) -> Hook:
    """The hook to call in the place of `hook`: itself, or itself with the care that it needs."""
    reached = list(_reachable(hook))
    if not any((one.__module__, one.__name__) in _CHAINING for one in reached):
        return hook
    # Views in the order of memory are what torch's PowerSGD takes gradients for. An optimizer beside
    # it compares them with parameters element by element, so it needs them as the parameters lie.
    in_memory_order = not any(one.__module__ == _OPTIMIZING for one in reached)
    return one_bucket_at_a_time(hook, in_memory_order)


def one_bucket_at_a_time(hook: Hook, in_memory_order: bool = False) -> Hook:
    """`hook`, finished before the call returns: for hooks that launch collectives from callbacks.

    A process group that is its state, or its state's `process_group`, is replaced by a blocking one
    for the time of the call. The hook works on a copy of the bucket that it may resize. With
    `in_memory_order`, gradients are contiguous views, whatever the parameters' strides are.
    """

    check_callable(hook)

    @functools.wraps(hook)
    def run(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        with _blocking(state) as lent:
            future = hook(lent, bucket if bucket.buffer().is_sparse else _copy(bucket, in_memory_order))
            if isinstance(future, torch._C.Future):  # what else it returns is refused by the caller
                future.wait()
        return future

    return run


@contextlib.contextmanager
def _blocking(state: Any) -> Iterator[Any]:
    """The state with its group made blocking; a state that has none to be seen stays as it is."""
    if state is None or isinstance(state, dist.ProcessGroup):
        yield BlockingGroup(collectives_from(state).group)
        return
    own = getattr(state, "process_group", state)
    if own is not None and not isinstance(own, dist.ProcessGroup):
        yield state
        return
    state.process_group = BlockingGroup(collectives_from(own).group)
    try:
        yield state
    finally:
        state.process_group = own


def _copy(bucket: GradBucket, in_memory_order: bool) -> GradBucket:
    flat = bucket.buffer().clone()
    gradients = bucket.gradients()
    copies = [
        flat.narrow(0, offset, numel).view(gradient.shape)
        if in_memory_order
        else flat.as_strided(gradient.shape, gradient.stride(), offset)
        for gradient, (offset, numel) in zip(gradients, bucket.spans(), strict=True)
    ]
    return GradBucket(
        index=bucket.index(),
        buffer=flat,
        gradients=copies,
        parameters=bucket.parameters(),
        is_last=bucket.is_last(),
        names=bucket.names(),
    )


def _reachable(hook: object) -> Iterator[types.FunctionType]:
    """The functions that a hook may call: itself, and what it holds in partials, closures and globals."""
    seen: set[int] = set()
    waiting = [hook]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting.append(one.__func__)
        elif isinstance(one, types.FunctionType):
            yield one
            waiting += _held(one)
        elif callable(one) and isinstance(type(one).__call__, types.FunctionType):
            waiting.append(type(one).__call__)
            waiting += [value for value in vars(one).values() if isinstance(value, types.FunctionType)]


def _held(function: types.FunctionType) -> list[object]:
    """What a function's body may name: closed-over values, globals, and attributes of imported modules."""
    held: list[object] = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            # Only hooks of torch: looking into all of every module would reach everything.
            found = [vars(value).get(attribute) for attribute in names]
            held += [one for one in found if str(getattr(one, "__module__", "")).startswith(_TORCH_HOOKS)]
        elif isinstance(value, (types.FunctionType, functools.partial)):
            held.append(value)
    return held


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
