"""Autograd's engine, as far as whoever acts during backward needs it: which pass runs, through what, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from ..comm.memory.left_over import backward_raised
from ..errors import ReductionError

# The id of the running backward pass, -1 outside. Private, but the only way to tell one pass from another;
# tests/ddp/test_torch_internals.py notices if it moves.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def unrecorded(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """As `torch.no_grad()`, for what is called in backward, where autograd hardly ever records anyway.

    Torch's decorator makes a new context per call: two microseconds each, of steps that may take three hundred.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


class BackwardEnd:
    """Queued with the engine: called when the pass has ended, destroyed uncalled if the pass raised.

    Nobody else may hold it, or the second would not be noticed: the engine drops what it did not call before the
    exception reaches the user, who may then zero gradients and go on. Not even a local variable of a function that may
    raise: the traceback keeps it.
    """

    __slots__ = ("__weakref__", "_ended", "_was_called")

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._ended()

    def __del__(self) -> None:
        # In an interpreter that is being taken down nobody goes on; and torch aborts if a tensor becomes a gradient then.
        if not self._was_called and not sys.is_finalizing():
            backward_raised()
            self.raised()

    def raised(self) -> None:
        """The pass raised. Where a kind of end says nothing else, it ends all the same."""
        self._ended()

    def queue(self) -> None:
        """Have it called at the end of the pass that runs now (a nested one, if it is one)."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            # The engine would drop it, and gradients would stay those of this rank without a word.
            raise ReductionError(
                "a backward under compiled autograd does not say when it ends, so its gradients cannot be averaged. Call "
                "backward() without torch._dynamo.config.compiled_autograd; torch.compile of the model is fine."
            )
        Variable._execution_engine.queue_callback(self)


# Frames of torch that are on the stack while the engine runs; tests/ddp/test_torch_internals.py notices if they move.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = BackwardCFunction.apply.__code__
_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__
# What each of them calls the tensors that it begins with.
_ROOTS = {_BACKWARD: "tensors", _GRAD: "outputs"}


def accumulates() -> bool:
    """Whether the running pass is one of `backward()`, for all leaves; not of `autograd.grad`, nor for chosen inputs."""
    frame = _caller_in(sys._getframe(1))
    if frame is None:
        # Autograd has a thread per device, whose stack does not reach back to the caller: he waits in another one.
        found = map(_caller_in, sys._current_frames().values())
        return any(caller is not None and _is_for_all_leaves(caller) for caller in found)
    return _is_for_all_leaves(frame)


def _caller_in(frame: FrameType | None) -> FrameType | None:
    """The innermost call of `backward()` or `autograd.grad` on this stack."""
    while frame is not None and frame.f_code not in _ROOTS:
        frame = frame.f_back
    return frame


def _is_for_all_leaves(caller: FrameType) -> bool:
    return caller.f_code is _BACKWARD and caller.f_locals.get("inputs") is None


def nodes_from(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graphs that begin with `roots`, once. About a microsecond per node."""
    waiting = [node for node in roots if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def nests(node: Any) -> bool:
    """Whether the node runs another backward inside, as reentrant checkpointing does."""
    return type(node).__name__ == "CheckpointFunctionBackward"


@dataclass(frozen=True, slots=True)
class RunningGraph:
    """Through what the passes on this stack go. `numbers`: of nodes (`node_number`); `leaves`: tensors, by identity."""

    numbers: frozenset[int]
    leaves: frozenset[int]
    nests: bool


def node_number(node: Any) -> int:
    """What a node is known by while nobody may hold it, which would keep its graph: counted per thread of forwards."""
    number: int = node._sequence_nr()
    return number


def running_graph() -> RunningGraph | None:
    """The graph of the passes that run, or have just raised, on this stack; None in a thread of autograd's own."""
    frame, roots = _caller_in(sys._getframe(1)), list[Any]()
    if frame is None:
        return None
    while frame is not None:
        begun = frame.f_locals.get(_ROOTS[frame.f_code], ())
        # A tensor has a node unless it is a leaf; `GradientEdge` is one.
        roots += [getattr(each, "grad_fn", getattr(each, "node", None)) for each in begun]
        frame = _caller_in(frame.f_back)
    nodes = list(nodes_from(roots))
    leaves = frozenset(id(node.variable) for node in nodes if type(node).__name__ == "AccumulateGrad")
    return RunningGraph(frozenset(map(node_number, nodes)), leaves, any(map(nests, nodes)))


def enclosing_function() -> Any:
    """Of a pass that was started inside another: the node of the outermost pass that did so. None of an outermost one."""
    node, num_passes = None, 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Whatever runs a pass is itself part of one. Not by counting two passes: in autograd's thread for a device the
        # outermost one is on no stack.
        if frame.f_code is _FUNCTION and num_passes:
            node = frame.f_locals["self"]
        num_passes += frame.f_code is _ENGINE
        frame = frame.f_back
    return node


def call_in_enclosing(node: Any, callback: Callable[[], Any]) -> None:
    """Call `callback` once in the pass that runs `node` now, as soon as it goes on to one of the nodes that follow."""
    handles: list[Any] = []

    def once(_grads: Any) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            callback()

    handles += [following.register_prehook(once) for following, _ in node.next_functions if following is not None]
