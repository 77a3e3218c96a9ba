"""Mixed precision: low-precision copies during forward and backward, full precision everywhere else.

    state      `param.data`   `param.grad`                               low copies       next
    FULL       full           full                                       none             begin_forward -> FORWARD;
    KEPT       full           as before                                  the forward's    begin_backward -> BACKWARD
    FORWARD    low            as before                                  in place         end_forward -> KEPT (without
                                                                                          gradients FULL); pause -> PAUSED
    PAUSED     full           full: a backward inside the forward        the forward's    resume -> FORWARD
                              gives out its means
    BACKWARD   low            low, as autograd makes it (added to a      in place         end_backward -> FULL
                              full one if there is one)

In FORWARD and PAUSED a forward or backward that begins changes nothing: parameters are those of the forward that goes on.
In BACKWARD neither does: they are those of the backward. Buffers go the same way as parameters. Checkpoints, optimizers and
users therefore never see a low-precision tensor. The copies made by a forward are kept until its backward has ended:
autograd saved the tensors themselves.

A parameter that several wrappers have (`passes/shared.py`) may be low already, put there by another. In forwards, one inside
the other, each puts back what it found; in a backward all of them, in any order, the full one.

A backward is known by the wrapper's outputs that it reaches. Of a loss that was no output it is known when it computes a
part of the module again (checkpointing), which has to be as low as the first time.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ...optim.engine import BackwardEnd, current_backward
from ...plan.params import gradient_dtype
from ..frames import untraced
from ..passes.listener import Listener
from ..reducer.hooks import remove_all
from ..structure import map_tensors

_NONE: Mapping[int, torch.Tensor] = {}


@dataclass
class MixedPrecision:
    """Which dtype parameters, gradient reduction and buffers have during training; None leaves them."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class Precision(enum.Enum):
    """Which precision is in place, and why: see the table above."""

    FULL = enum.auto()
    KEPT = enum.auto()
    FORWARD = enum.auto()
    PAUSED = enum.auto()
    BACKWARD = enum.auto()


_alive: weakref.WeakSet[LowPrecision] = weakref.WeakSet()


class LowPrecision(Listener):
    """Swaps the parameters and buffers of one module. Never leaves them swapped outside its contexts."""

    def __init__(self, config: Any, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self.config = config
        self._params = [
            param
            for name, param in module.named_parameters()
            if name not in ignored and param.is_floating_point() and not hasattr(param, "_ddp_ignored")
        ]
        self._buffers = [
            buffer
            for name, buffer in module.named_buffers()
            if name not in ignored and buffer.is_floating_point()
        ]
        self.state = Precision.FULL
        self._full: list[torch.Tensor] = []  # what is not in place, while low is
        self._low: list[torch.Tensor] = []  # the copies, from a forward to the end of its backward
        # In BACKWARD: the low buffers as they were when it began. They are those of the forward.
        self._began_with: list[torch.Tensor] = []
        self._modules = weakref.WeakSet(module.modules())
        self._handles: list[RemovableHandle] = []  # none or one
        weakref.finalize(self, remove_all, self._handles)
        _alive.add(self)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the buckets: as asked for, else that of the gradients as they arrive."""
        chosen: torch.dtype | None = self.config.reduce_dtype or self.config.param_dtype
        return chosen

    @property
    def is_on(self) -> bool:
        """Whether parameters and buffers are in low precision now."""
        return self.state in (Precision.FORWARD, Precision.BACKWARD)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.config.param_dtype
        if dtype is None:
            return args, kwargs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def _make_low(self) -> list[torch.Tensor]:
        wanted: list[tuple[torch.Tensor, torch.dtype | None]]
        wanted = [(param, self.config.param_dtype) for param in self._params]
        wanted += [(buffer, self.config.buffer_dtype) for buffer in self._buffers]
        return [tensor.data if dtype is None else tensor.data.to(dtype) for tensor, dtype in wanted]

    def _full_elsewhere(self) -> dict[int, torch.Tensor]:
        """By identity, the full ones of tensors that other wrappers have too, and have put low."""
        full: dict[int, torch.Tensor] = {}
        for other in _alive:
            if other is not self and other.is_on:
                tensors = map(id, [*other._params, *other._buffers])
                # Of several the widest: one that began inside another's forward has found a low one.
                for key, found in zip(tensors, other._full, strict=True):
                    full[key] = max(found, full.get(key, found), key=lambda one: one.dtype.itemsize)
        return full

    def _put_low(self, full: Mapping[int, torch.Tensor] = _NONE) -> None:
        """`full`: what to put back in place of what is there now, by identity."""
        tensors = [*self._params, *self._buffers]
        self._full = [full.get(id(tensor), tensor.data) for tensor in tensors]
        for tensor, low in zip(tensors, self._low, strict=True):
            tensor.data = low

    @torch.no_grad()
    def _put_full(self) -> None:
        for param, full in zip(self._params, self._full, strict=False):
            param.data = full
        self.local_backward_ended()
        for nth, (buffer, full) in enumerate(zip(self._buffers, self._full[len(self._params) :], strict=True)):
            if buffer.dtype != full.dtype:
                # What the module did to its buffer is kept. In backward only that: the full one may have been changed since
                # the forward, by a hook that averages buffers or by the user. By value: batch norm counts no version.
                changed = buffer.data
                if self._began_with:
                    changed = torch.where(changed != self._began_with[nth], changed, full)
                full.copy_(changed)
            buffer.data = full
        self._full, self._began_with = [], []

    # -- transitions ---------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        remove_all(self._handles)
        self._low = self._make_low()
        self._put_low()
        self.state = Precision.FORWARD

    def _end_forward(self) -> None:
        assert self.state is Precision.FORWARD, f"a forward ends while parameters are {self.state.name}"
        self._put_full()
        self.state = Precision.KEPT
        if not torch.is_grad_enabled():
            self._low, self.state = [], Precision.FULL
        elif not torch.compiler.is_compiling():
            self._watch()

    def begin_backward(self) -> None:
        """A backward through a low-precision forward starts; ends by itself with that backward."""
        if self.state not in (Precision.FULL, Precision.KEPT):
            return
        if self.state is Precision.FULL:
            # Another backward than the one that freed them: of a second forward, or of the same graph again. The
            # parameters are those of the forward, or autograd would refuse the backward by their versions.
            self._low = self._make_low()
        self._put_low(self._full_elsewhere())
        self._began_with = [low.clone() for low in self._low[len(self._params) :]]
        self.state = Precision.BACKWARD
        # Also if the backward raises: nobody outside may see a parameter in low precision.
        BackwardEnd(self._end_backward).queue()

    @untraced
    def _end_backward(self) -> None:
        if self.state is Precision.BACKWARD:  # not if the reducer has ended it already
            self._put_full()
            self._low, self.state = [], Precision.FULL
            remove_all(self._handles)

    def _pause(self) -> None:
        self._put_full()
        self.state = Precision.PAUSED
        BackwardEnd(self._resume).queue()

    @untraced
    def _resume(self) -> None:
        self._put_low()
        self.state = Precision.FORWARD

    # -- when ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Parameters and buffers are low inside; buffers changed inside keep their change."""
        if self.state not in (Precision.FULL, Precision.KEPT):
            # A forward inside backward (checkpointing around the wrapper) or inside another one: they are low already.
            yield
            return
        self._begin_forward()
        try:
            yield
        finally:
            self._end_forward()

    def _watch(self) -> None:
        """Until the backward has ended: see whether a part of the module is computed again in it."""
        method = weakref.WeakMethod(self._module_runs)

        def before(module: torch.nn.Module, _args: Any) -> None:
            runs = method()
            if runs is not None:
                runs(module)

        self._handles.append(register_module_forward_pre_hook(before))

    def _module_runs(self, module: torch.nn.Module) -> None:
        if current_backward() != -1 and not self.is_on and module in self._modules:
            self.begin_backward()

    def local_backward_ended(self) -> None:
        """Of a backward whose outputs we did not see: gradients are as low as the forward was."""
        full = self._full_elsewhere()
        for param in self._params:
            if id(param) in full and full[id(param)].dtype != param.dtype:
                continue  # low for as long as another wrapper's forward or backward lasts, unlike its gradient
            if param.grad is not None and param.grad.dtype != gradient_dtype(param):
                param.grad = param.grad.to(gradient_dtype(param))

    def backward_ended(self) -> None:
        """The reducer is about to take gradients, perhaps before the end that was queued here."""
        self._end_backward()
        if self.state is Precision.FORWARD:
            # A backward inside forward: the means are full, and so is what the optimizer steps, but forward goes on.
            self._pause()
