"""Parameters whose reduction waits until a chosen parameter's gradient is ready.

Their gradients live in one buffer from the start. The chosen parameter only gives permission: the buffer
itself leaves after the last bucket, because that is the one place where every rank agrees on the order.
Where all parameters are delayed there are no buckets, and it leaves at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from ..comm.collectives import Collectives, Work
from .frames import untraced


class DelayedReduction:
    """One buffer a dtype for the delayed parameters, reduced once a backward at most."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        collectives: Collectives,
    ) -> None:
        self.params = [param for _, param in named]
        self.collectives = collectives
        self.enabled = True
        self.alone = False
        self._ready = False
        self._works: list[Work] = []
        self._flats: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = [param.detach() for param in self.params]
        for dtype in dict.fromkeys(param.dtype for param in self.params):
            self._lay_out(dtype)
        # Weak, because a parameter's hooks are invisible to the garbage collector.
        on_trigger = weakref.WeakMethod(self._on_trigger)
        self._handle = trigger.register_post_accumulate_grad_hook(untraced(lambda _: _call(on_trigger)))

    def _lay_out(self, dtype: torch.dtype) -> None:
        members = [i for i, param in enumerate(self.params) if param.dtype == dtype]
        total = sum(self.params[i].numel() for i in members)
        flat = self.collectives.allocate(total, dtype, self.params[members[0]].device)
        self._flats.append(flat)
        offset = 0
        for i in members:
            param = self.params[i]
            self._views[i] = flat[offset : offset + param.numel()].view(param.shape)
            offset += param.numel()

    def prepare(self) -> None:
        """Before backward: gradients that were set to None become zeroed views of the buffer."""
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is None:
                param.grad = view.zero_()

    def _on_trigger(self) -> None:
        if not self.enabled:
            return
        self._ready = True
        if self.alone:
            self.launch()
            Variable._execution_engine.queue_callback(self.finish)

    @torch.no_grad()
    def launch(self) -> None:
        """Send the buffers if the chosen parameter has given permission in this backward."""
        if not self._ready:
            return
        self._ready = False
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is not None and param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
                param.grad = view
        scale = 1.0 / self.collectives.world
        self._works = [self.collectives.all_reduce(flat, scale) for flat in self._flats]

    @untraced
    def finish(self) -> None:
        """Return when the delayed gradients are averaged."""
        works, self._works = self._works, []
        for work in works:
            self.collectives.wait(work, "reducing delayed parameters")

    def detach(self) -> None:
        self._handle.remove()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
