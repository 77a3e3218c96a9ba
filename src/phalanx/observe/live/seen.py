"""What a script does not say and can be seen: its optimizer's steps and memory, and the loss it calls backward on.

Installed by the bootstrap of `phalanx run`, in the worker, before the script runs; everything but counting only while the
run is traced. A script that records `loss` itself (`trace.scalar`) is taken at its word: what is seen has a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.observe import trace
from phalanx.observe.live.pulse import pulse

# After these steps the memory of an optimizer is looked at: most make their state in the first.
_LOOKS_AT_MEMORY = frozenset(2**power for power in range(1, 24))


class _Steps:
    """Steps of optimizers under way. One inside another is ZeRO's: the inner one computes, and what the outer one does after
    it is waiting until every rank has everybody's parameters."""

    def __init__(self, recorder: trace.Recorder | None) -> None:
        self._recorder = recorder
        # When each step under way was begun, by optimizer, the outer one first.
        self._started: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._inner_ended_ns = 0

    def before(self, optimizer: Optimizer, *arguments: Any) -> None:
        if id(optimizer) in self._started:
            self._started.clear()  # a step that raised is told of by nobody; the next one begins anew
        if not self._started:
            self._inner_ended_ns = 0
        self._started[id(optimizer)] = trace.now_ns()

    def after(self, optimizer: Optimizer, *arguments: Any) -> None:
        start = self._started.pop(id(optimizer), None)
        is_outer = not self._started
        pulse.updates += is_outer
        if self._recorder is None:
            return
        now = trace.now_ns()
        if is_outer and self._inner_ended_ns:
            self._recorder.span(trace.WAITING, self._inner_ended_ns, now)
        elif start is not None:
            self._recorder.span(trace.OPTIMIZER, start, now)
        self._inner_ended_ns = now
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if is_outer and count in _LOOKS_AT_MEMORY:
            self._recorder.fact(trace.MEMORY, memory_of(optimizer))


# ZeroRedundancyOptimizer runs hooks of all optimizers once per step, and these for its parts as well.
_Steps.before.sees_parts = _Steps.after.sees_parts = True  # type: ignore[attr-defined]


def see_optimizers(recorder: trace.Recorder | None) -> None:
    """From now on count every optimizer's steps; with a recorder also record spans of them, and what they hold."""
    steps = _Steps(recorder)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)


def memory_of(optimizer: Optimizer) -> dict[str, Any]:
    """Bytes that training holds on this rank, by kind, without asking the others."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # ZeRO keeps a part of the state in an optimizer of its own; the parts of all ranks make the whole. Found by name,
    # since this module is imported where ZeRO is not.
    local: int | None = getattr(optimizer, "local_state_bytes", None)
    state = _state_bytes(optimizer) if local is None else local
    return {
        "state": state,
        "gradients": sum(_bytes(param.grad) for param in params if param.grad is not None),
        "parameters": sum(_bytes(param) for param in params),
        "sharded": local is not None,
    }


def _state_bytes(optimizer: Optimizer) -> int:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return sum(_bytes(value) for value in held if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def see_losses(recorder: trace.Recorder) -> None:
    """Record the value of every scalar that `backward` is called on.

    On the CPU it is there at once. On another device reading it would make the host wait, so it is read at the next
    backward, when it has long been computed; the last one of a run is lost.
    """
    backward: Callable[..., None] = torch.Tensor.backward
    waiting: list[tuple[int, torch.Tensor]] = []
    count = 0

    def seen(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        nonlocal count
        backward(self, *arguments, **options)
        if self.numel() != 1 or self.is_complex():
            return
        for step, value in waiting:
            _record(recorder, step, value)
        waiting.clear()
        if self.device.type == "cpu":
            _record(recorder, count, self)
        else:
            waiting.append((count, self.detach()))
        count += 1

    torch.Tensor.backward = seen  # type: ignore[method-assign]


def _record(recorder: trace.Recorder, step: int, value: torch.Tensor) -> None:
    try:
        pulse.loss = float(value.detach())
    except RuntimeError:
        return  # of a rehearsal on the meta device or with fake tensors, which have no values
    recorder.scalar(trace.SEEN_LOSS, step, pulse.loss)
