"""The optimizer an owner holds for a caller: its share of the parameters, and all that is done to them.

One lock serialises all updates on a worker: several callers may have their own optimizers over the
same parameters, and an update must be neither torn nor lost. Kernels release the GIL, so the
worker's other threads go on while an update runs.

Knows distributed autograd, from which gradients come, but sends nothing: owner.py is the way in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.optim import Optimizer

from phalanx.errors import ArgumentTypeError, ConfigError, RemoteError, StateError
from phalanx.remote.groups import Changes, Ledger, Options, apply, options_of
from phalanx.remote.packing import ELEMENTWISE, Packer

UPDATES = threading.Lock()
# Enough to settle any step that a caller can still be asking about.
_STEPS_REMEMBERED = 256


class GroupSpec(NamedTuple):
    """One group's share on one owner. `options` is None where the caller gave a bare list."""

    options: Options | None
    params: list[Any]
    positions: list[int]


class Stepped(NamedTuple):
    """The answer to a step."""

    waited_s: float
    update_s: float
    num_updated: int
    clock: float


class HalfDone(Exception):
    """Wraps what an optimizer raised while it was updating."""


class OwnedOptimizer:
    """A plain optimizer over this worker's share of the parameters. Methods are called through `serve`."""

    def __init__(
        self,
        make: Callable[..., Optimizer],
        specs: Sequence[GroupSpec],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._seen: dict[int, int] = {}
        resolved = [self._resolve(spec) for spec in specs]
        bare = len(specs) == 1 and specs[0].options is None
        params = (
            resolved[0]
            if bare
            else [{**(spec.options or {}), "params": tensors} for spec, tensors in zip(specs, resolved, strict=True)]
        )
        self.optimizer = make(params, *args, **kwargs)
        self._packer = Packer(self.optimizer)
        self.ledger = Ledger(self.optimizer.param_groups)
        self._accumulated: dict[Tensor, Tensor] = {}
        # Contexts whose gradients are in `_accumulated`: a context counts once, whoever names it again.
        self._folded: set[int] = set()
        self._applied: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        self._staged: tuple[Any, Any] | None = None

    def _resolve(self, spec: GroupSpec) -> list[Tensor]:
        tensors: list[Tensor] = []
        for rref, position in zip(spec.params, spec.positions, strict=True):
            value = rref.local_value()
            if not isinstance(value, Tensor):
                raise ArgumentTypeError(
                    f"parameter {position} refers to a {type(value).__name__}; expected an RRef of a tensor."
                )
            if not value.is_leaf:
                raise ConfigError(
                    f"parameter {position} is not a leaf: it is computed by {value.grad_fn}. "
                    "Optimize the tensors it is computed from."
                )
            if id(value) in self._seen:
                raise ConfigError(
                    f"parameters {self._seen[id(value)]} and {position} are the same tensor. Name each parameter once."
                )
            self._seen[id(value)] = position
            tensors.append(value)
        return tensors

    def params(self) -> list[Tensor]:
        """This worker's parameters, in the local optimizer's numbering."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def gradients(self, context_id: int | None) -> Mapping[Tensor, Tensor]:
        """The gradients a step with this context applies: accumulated ones plus the context's own."""
        fresh = {} if context_id is None or context_id in self._folded else _gradients_of(context_id)
        if not self._accumulated:
            return fresh
        total = dict(self._accumulated)
        for param, grad in fresh.items():
            total[param] = total[param] + grad if param in total else grad
        return total

    def step(self, number: int, context_id: int | None, deadline: float) -> Stepped:
        """Apply one update, unless `deadline` (on this worker's clock) passes before it begins."""
        asked = time.monotonic()
        if not UPDATES.acquire(timeout=max(deadline - asked, 0.0)):
            raise RemoteError("the time limit passed while another update was under way; nothing was changed here.")
        try:
            begun = time.monotonic()
            if begun > deadline:
                raise RemoteError("the step arrived after its time limit; nothing was changed here.")
            gradients = self.gradients(context_id)
            try:
                num_updated = self._packer.step(gradients) if gradients else 0
            except Exception as error:
                raise HalfDone from error
            self._applied.append(number)
            self._forget()
        finally:
            UPDATES.release()
        done = time.monotonic()
        return Stepped(begun - asked, done - begun, num_updated, done)

    def has_applied(self, number: int) -> bool:
        """Whether step `number` was applied here."""
        with UPDATES:
            return number in self._applied

    def accumulate(self, context_id: int) -> None:
        """Add the context's gradients to those the next step applies."""
        with UPDATES:
            gradients = self.gradients(context_id)
            self._accumulated = {param: gradients[param] for param in self.params() if param in gradients}
            self._folded.add(context_id)

    def norms(self, context_id: int | None, norm_type: float) -> tuple[list[int], list[Tensor]]:
        """The norm of each gradient, with the local number of its parameter."""
        if self._accumulated and context_id is not None:
            self.accumulate(context_id)
        gradients = self.gradients(context_id)
        found = [(number, gradients[param]) for number, param in enumerate(self.params()) if param in gradients]
        norms = [torch.linalg.vector_norm(_values(grad), norm_type) for _, grad in found]
        return [number for number, _ in found], norms

    def scale(self, context_id: int | None, coefficient: Tensor) -> None:
        """Multiply, in place, the gradients that `norms` has just measured."""
        gradients = self.gradients(context_id)
        for param in self.params():
            if param in gradients:
                gradients[param].mul_(coefficient.to(gradients[param].device))

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop accumulated gradients, and reset `.grad` as the plain optimizer does."""
        with UPDATES:
            self._forget()
            self.optimizer.zero_grad(set_to_none)

    def _forget(self) -> None:
        self._accumulated = {}
        self._folded = set()

    def add_group(self, spec: GroupSpec) -> Options:
        """Add a parameter group at the end and answer its options."""
        with UPDATES:
            known = dict(self._seen)
            try:
                tensors = self._resolve(spec)
                self._packer.unpack()
                self.optimizer.add_param_group({**(spec.options or {}), "params": tensors})
            except Exception:
                self._seen = known
                raise
            self.ledger.append(self.optimizer.param_groups[-1])
            return options_of(self.optimizer.param_groups[-1])

    def drop_group(self) -> None:
        """Undo the last `add_group`, which failed on another owner."""
        with UPDATES:
            self._packer.unpack()
            for param in self.optimizer.param_groups.pop()["params"]:
                self._seen.pop(id(param), None)
                self.optimizer.state.pop(param, None)
            self.ledger = Ledger(self.optimizer.param_groups)

    def take_options(self, changes: Changes) -> None:
        """Take over options that the caller has changed."""
        with UPDATES:
            apply(self.optimizer.param_groups, changes)
            self.ledger.note(changes)

    def tell_options(self, everything: bool) -> Changes | None:
        """The options changed here since the caller was last told, or all of them."""
        groups = self.optimizer.param_groups
        told: Changes = (
            {index: (options_of(group), ()) for index, group in enumerate(groups)}
            if everything
            else self.ledger.changes(groups)
        )
        self.ledger.note(told)
        return told or None

    def options(self) -> list[Options]:
        """The options of each group as they are now."""
        return [options_of(group) for group in self.optimizer.param_groups]

    def save(self) -> dict[str, Any]:
        """The plain optimizer's state dict, its tensors copied to the CPU."""
        with UPDATES:
            self._packer.unpack()
            saved: dict[str, Any] = _copied(self.optimizer.state_dict())
            return saved

    def stage(self, saved: dict[str, Any]) -> None:
        """Build the state that `commit` will put in place; raise, changing nothing, if it does not fit."""
        with UPDATES:
            self._packer.unpack()
            self._check_fit(saved["state"])
            before = self.optimizer.state, self.optimizer.param_groups
            try:
                self.optimizer.load_state_dict(saved)
                self._staged = self.optimizer.state, self.optimizer.param_groups
            finally:
                self.optimizer.state, self.optimizer.param_groups = before

    def commit(self) -> list[Options]:
        """Put the staged state in place and answer the groups' options."""
        with UPDATES:
            if self._staged is None:
                raise StateError("there is no staged state to put in place.")
            self._packer.unpack()
            self.optimizer.state, self.optimizer.param_groups = self._staged
            self._staged = None
            self.ledger = Ledger(self.optimizer.param_groups)
            return self.options()

    def discard(self) -> None:
        """Forget a staged state, which did not fit another owner."""
        self._staged = None

    def _check_fit(self, state: Mapping[Any, Any]) -> None:
        strict = type(self.optimizer) in ELEMENTWISE
        for number, param in enumerate(self.params()):
            new, held = state.get(number, {}), self.optimizer.state.get(param)
            if held and new and set(held) != set(new):
                raise StateError(f"parameter {number} here has state {sorted(held)}, the saved one {sorted(new)}.")
            for key, value in new.items():
                like = held[key] if held else param
                if not _fits(value, like, exact=bool(held) or strict):
                    raise StateError(
                        f"parameter {number} here has shape {tuple(param.shape)}, the saved '{key}' {tuple(value.shape)}."
                    )


def _gradients_of(context_id: int) -> Mapping[Tensor, Tensor]:
    try:
        gradients: Mapping[Tensor, Tensor] = dist_autograd.get_gradients(context_id)
    except RuntimeError as error:
        # The caller has checked that the context is open. A worker that took no part in the forward
        # pass has never heard of it, and so has no gradients.
        if "Could not find autograd context" in str(error):
            return {}
        raise
    return gradients


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _fits(value: Any, like: Any, exact: bool) -> bool:
    """Whether a saved value can stand where `like` (the state held now, else the parameter) does.

    Without `exact`, for an optimizer whose state may have shapes of its own, only what cannot be meant
    for this parameter is refused: as many dimensions, of other sizes.
    """
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.dim() == 0:
        return True
    if exact:
        return value.shape == like.shape
    sizes = zip(value.shape, like.shape, strict=False)
    return value.dim() != like.dim() or all(size in (1, full) for size, full in sizes)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
