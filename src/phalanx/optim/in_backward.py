"""An optimizer that steps during backward, as soon as a gradient is complete, and frees it.

Alone, a parameter is stepped by its own hook. Wrapped in DistributedDataParallel, the wrapper takes over:
it steps a bucket's parameters when their mean has arrived, and not at all under `no_sync`. With `max_norm`
all steps wait until the last gradient is there, because the global norm needs them all; alone also where reentrant
checkpointing runs passes inside the pass, each of which may bring a part of a shared parameter's gradient only.
Must not know of process groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import ArgumentTypeError, ConfigError
from .engine import BackwardEnd, call_in_enclosing, current_backward, enclosing_function, running_graph

_OWNERS = "_phalanx_in_backward"
_num_applied = 0


class InBackward:
    """One small optimizer a parameter, all of one class. Made by `apply_in_backward`."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Sequence[torch.nn.Parameter],
        max_norm: float | None,
        options: dict[str, Any],
    ) -> None:
        self.params = list(params)
        self.max_norm = max_norm
        self.last_norm: torch.Tensor | None = None
        self._optimizers = {param: optimizer_class([param], **options) for param in self.params}
        self._accumulating = False
        self._pending: list[torch.nn.Parameter] = []
        # The end of the backward under way, or where it will be queued from: both belong to autograd and live as long.
        self._end: Callable[[], _End | None] = _nothing
        self._enclosing: Callable[[], Any] = _nothing
        self._seen = (-1, False)  # the pass that was looked at last, and whether there are passes inside it or around it
        self._handles: dict[torch.nn.Parameter, RemovableHandle] = {}
        # The parameters keep this object alive through an attribute, which the garbage collector can
        # follow, and their hooks refer to it weakly, because those it cannot.
        reference = weakref.ref(self)
        for param in self.params:
            owners = param.__dict__.setdefault(_OWNERS, [])
            owners.append(self)
            self._handles[param] = param.register_post_accumulate_grad_hook(lambda p: _notify(reference, p))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Every parameter's group; change "lr" in all of them to change the learning rate."""
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers in the order of the parameters, for schedulers and for saving."""
        return list(self._optimizers.values())

    def optimizers_of(self, param: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
        """The one that steps this parameter, if any does."""
        return [self._optimizers[param]] if param in self._optimizers else []

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside only add up gradients; the first one outside steps."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def hand_over(self, params: Collection[torch.nn.Parameter]) -> None:
        """Stop stepping `params` from hooks: a wrapper calls `gradients_ready` and `backward_ended` for them from now on.

        Parameters that the wrapper does not have are stepped from their hooks as before. With `max_norm` they are
        refused: what the wrapper knows of is only a part of the norm, and when they have gradient it does not know.
        """
        theirs = set(params)
        num_others = sum(param not in theirs for param in self.params)
        if num_others and self.max_norm is not None:
            raise ConfigError(
                f"apply_in_backward with max_norm got {num_others} of {len(self.params)} parameters that the wrapped model "
                "does not have, or does not reduce: a norm over these and the model's is known to nobody during backward. "
                "Give apply_in_backward the parameters of the wrapped model, and call it once more for the others."
            )
        for param in self.params:
            if param in theirs and param in self._handles:
                self._handles.pop(param).remove()

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._accumulating:
            return
        if self._end() is None:
            if self.max_norm is None and not self._is_nested():
                self._step(param)
                return
            self._queue_end()
        self._pending.append(param)  # type: ignore[arg-type]

    def _is_nested(self) -> bool:
        """Whether a gradient that is there now may be a part of it only, and its weights still be needed."""
        running = current_backward()
        if running != self._seen[0]:
            graph = running_graph()
            self._seen = running, enclosing_function() is not None or (graph is not None and graph.nests)
        return self._seen[1]

    def _queue_end(self) -> None:
        """Have the outermost pass that runs now call `backward_ended`: one inside it ends before all gradients are there."""
        node = enclosing_function()
        if node is not None and node is self._enclosing():
            return  # another gradient of the same nested pass
        self._pending.clear()  # of a backward that raised between two nested passes, of which nobody was told
        if node is None:
            self._queue_here()
        else:
            self._enclosing = weakref.ref(node)
            call_in_enclosing(node, self._queue_here)

    def _queue_here(self) -> None:
        end = _End(self)
        self._end = weakref.ref(end)
        end.queue()

    def backward_raised(self) -> None:
        """What was waiting for the end waits no more: the user may have zeroed its gradients."""
        self._pending.clear()

    def gradients_ready(self, params: Iterable[torch.nn.Parameter]) -> None:
        """These parameters hold their final gradient: step them now, or at the end with `max_norm`."""
        if self._accumulating:
            return
        mine = [param for param in params if param in self._optimizers and param.grad is not None]
        if self.max_norm is not None:
            self._pending += mine
            return
        for param in mine:
            self._step(param)

    def backward_ended(self) -> None:
        """All gradients are there: clip them together, then step."""
        self._end = _nothing  # which lives on if this raises, for as long as the user keeps the exception
        waiting, self._pending = list(dict.fromkeys(self._pending)), []
        if waiting and self.max_norm is not None:
            self.last_norm = torch.nn.utils.clip_grad_norm_(waiting, self.max_norm)
        for param in waiting:
            self._step(param)

    @torch.no_grad()
    def _step(self, param: torch.Tensor) -> None:
        self._optimizers[param].step()  # type: ignore[index]
        param.grad = None


class _End(BackwardEnd):
    """The end of a backward outside of any wrapper."""

    __slots__ = ("_owner",)

    def __init__(self, owner: InBackward) -> None:
        super().__init__(owner.backward_ended)
        self._owner = owner

    def raised(self) -> None:
        self._owner.backward_raised()


def _nothing() -> None:
    """No backward is under way."""


def _notify(reference: weakref.ref[InBackward], param: torch.Tensor) -> None:
    owner = reference()
    if owner is not None:
        owner._on_gradient(param)


def apply_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    *,
    max_norm: float | None = None,
    **options: Any,
) -> InBackward:
    """Step `params` with `optimizer_class(…, **options)` during backward and free each gradient at once.

    Without a wrapper, where reentrant checkpointing is used, all of them at its end.

    `max_norm` clips by the norm over all these parameters. Of a model that is wrapped, call it before a forward, not
    between forward and backward, on every rank alike: the next forward takes it over, and its backward compares.
    """
    global _num_applied
    if not callable(optimizer_class):
        raise ArgumentTypeError(f"optimizer_class must be a class, such as torch.optim.SGD, got {optimizer_class!r}.")
    if not isinstance(params, Iterable):
        raise ArgumentTypeError(f"params must be an iterable of parameters, got {params!r}. Give model.parameters().")
    # Each once: a second hook would outlive `hand_over`, and step by gradients that no wrapper has reduced.
    listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list({id(one): one for one in params}.values())
    if not listed:
        raise ConfigError("apply_in_backward got no parameters. Give model.parameters().")
    for param in listed:
        if not isinstance(param, torch.Tensor) or not param.is_leaf or not param.requires_grad:
            raise ArgumentTypeError(
                f"apply_in_backward takes parameters that require a gradient, got {type(param).__name__}. "
                "Give model.parameters() without the frozen ones."
            )
        if getattr(param, _OWNERS, None):
            raise ConfigError(
                f"apply_in_backward got a parameter of shape {tuple(param.shape)} that another call of it steps already: "
                "that one frees its gradient, and nothing would be left to step by. Change the first one's `param_groups`."
            )
    given: Any = max_norm
    is_number = isinstance(given, Real) or (isinstance(given, torch.Tensor) and given.numel() == 1)
    if given is not None and (isinstance(given, bool) or not is_number):
        raise ArgumentTypeError(f"max_norm must be a number, got {given!r}. Leave it out for no clipping.")
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm must be positive, got {max_norm}. Leave it out for no clipping.")
    _num_applied += 1
    return InBackward(optimizer_class, listed, max_norm, options)


def num_applied() -> int:
    """How often this was called in this process: who has looked for optimizers since the last time need not look again."""
    return _num_applied


def in_backward_optimizers(params: Iterable[torch.nn.Parameter]) -> list[InBackward]:
    """Those that were applied to any of `params`, each once."""
    found: dict[InBackward, None] = {}
    for param in params:
        for owner in getattr(param, _OWNERS, ()):
            found[owner] = None
    return list(found)
