"""Applying gradients to a plain torch optimizer, many small parameters at a time.

A step over a hundred small parameters costs some thousand tiny kernels, each with its dispatch and
its hold of the GIL; the arithmetic itself is next to nothing. For optimizers whose arithmetic is
elementwise the parameters are *packed*: a shadow of the optimizer steps on one flat tensor, into
which parameters and gradients are copied and from which the results are copied back. The same
kernels run on the same numbers, so the result is bit-equal to stepping each parameter by itself.

The state of a parameter lives in exactly one place: in the shadow while the parameter is packed,
else in the plain optimizer. `unpack` moves everything home. See docs/design/remote.md, "Packing".

Knows nothing of RPC; not thread-safe (the owner's lock is around it).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

# Exact classes, not subclasses: a subclass may do anything to its parameters. Each of them is shown
# bit-equal to its unpacked self by tests/remote/test_packing.py.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Adamax,
        optim.Rprop,
        optim.NAdam,
        optim.RAdam,
        optim.ASGD,
    }
)

# Narrow types round differently in the vector and the scalar part of a kernel, and packing moves
# elements from one part to the other.
_DTYPES = frozenset({torch.float32, torch.float64})
# Beyond this size copying in and out costs more than the dispatch it saves; packs stay within the cache.
_MEMBER_NUMEL = 1 << 12
_PACK_NUMEL = 1 << 16


class _Pack:
    """Parameters of one group that step as one flat tensor."""

    def __init__(self, group: int, params: list[Tensor], scratch: tuple[Tensor, Tensor]) -> None:
        self.group = group
        self.params = params
        numel = sum(param.numel() for param in params)
        # Views of their own, because the state in the shadow is kept by tensor.
        self.flat = scratch[0][:numel]
        self.flat.grad = scratch[1][:numel]
        self.values = self.cut(self.flat)
        self.grads = self.cut(self.flat.grad)
        self._momentum: tuple[Tensor, list[Tensor]] | None = None

    def cut(self, flat: Tensor) -> list[Tensor]:
        """`flat` as one view a parameter, each of its parameter's shape."""
        pieces = torch.split(flat, [param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


    def momentum(self, flat: Tensor) -> list[Tensor]:
        """`flat`, the buffer of momentum, cut; remembered, as it stays the same from step to step."""
        if self._momentum is None or self._momentum[0] is not flat:
            self._momentum = flat, self.cut(flat)
        return self._momentum[1]


class Packer:
    """Steps `optimizer` with given gradients, packing what can be packed.

    The optimizer's own `step` is used as it is; only the tensors it sees may be packed ones.
    `.grad` of every parameter is left as it was found.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._elementwise = type(optimizer) in ELEMENTWISE
        self._shadow: Optimizer | None = None
        self._packs: list[_Pack] = []
        self._scratch: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._packed: set[int] = set()
        self._all_packed = False
        # Ids of the loose parameters of the last step: packs are made when two steps in a row agree,
        # so that gradients which come and go do not pack and unpack at every step. The first step counts
        # as agreed.
        self._last_loose: frozenset[int] | None = None
        self._given_up: frozenset[int] = frozenset()

    def step(self, gradients: Mapping[Tensor, Tensor]) -> int:
        """Apply `gradients` once; parameters not in it stay untouched. Returns how many were updated."""
        with torch.no_grad():
            if _has_own_ways(self.optimizer):
                self.unpack()
                loose = self._gather_loose(gradients)
                if loose:
                    self._step_loose(loose)
                return len(loose)
            if self._is_bare_sgd():
                return self._step_bare_sgd(gradients)
            packed = self._gather_packed(gradients)
            loose = [] if self._all_packed else self._gather_loose(gradients)
            if loose and self._elementwise and self._make_packs(loose):
                packed = self._gather_packed(gradients)
                loose = [(param, grad) for param, grad in loose if id(param) not in self._packed]
            if packed:
                self._step_packs(packed)
            if loose:
                self._step_loose(loose)
        return len(loose) + len(self._packed)

    def unpack(self) -> None:
        """Move all state into the plain optimizer, as if nothing had ever been packed."""
        for pack in self._packs:
            self._bring_home(pack)
        self._packs, self._packed, self._shadow = [], set(), None
        self._all_packed = False
        self._last_loose, self._given_up = None, frozenset()

    def _is_bare_sgd(self) -> bool:
        """Whether a step is one addition a parameter, for which one call over all of them is best."""
        return type(self.optimizer) is optim.SGD and not any(
            group["momentum"] or _has_extras(group) for group in self.optimizer.param_groups
        )

    def _step_bare_sgd(self, gradients: Mapping[Tensor, Tensor]) -> int:
        num_updated = 0
        for group in self.optimizer.param_groups:
            params: list[Tensor] = group["params"]
            grads = list(map(gradients.get, params))
            if any(grad is None for grad in grads):
                params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
            if params:
                torch._foreach_add_(params, grads, alpha=-group["lr"])  # type: ignore[arg-type]
            num_updated += len(params)
        return num_updated

    def _gather_packed(self, gradients: Mapping[Tensor, Tensor]) -> list[tuple[_Pack, list[Tensor]]]:
        """Every pack with its members' gradients; a pack that lacks one is broken up."""
        whole: list[tuple[_Pack, list[Tensor]]] = []
        for pack in self._packs:
            grads = [grad for grad in map(gradients.get, pack.params) if _is_dense(grad)]
            if len(grads) == len(pack.params):
                whole.append((pack, grads))
            else:
                self._bring_home(pack)
                self._packed.difference_update(map(id, pack.params))
        if len(whole) < len(self._packs):
            self._packs = [pack for pack, _ in whole]
            self._last_loose = frozenset()
            self._all_packed = False
        return whole

    def _gather_loose(self, gradients: Mapping[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [
            (param, gradients[param])
            for group in self.optimizer.param_groups
            for param in group["params"]
            if id(param) not in self._packed and param in gradients
        ]

    def _make_packs(self, loose: list[tuple[Tensor, Tensor]]) -> bool:
        """Pack what is worth it among `loose`; say whether anything was packed."""
        now = frozenset(id(param) for param, _ in loose)
        agreed = self._last_loose in (None, now)
        self._last_loose = now
        if not agreed or now == self._given_up:
            return False
        dense = {id(param) for param, grad in loose if _is_dense(grad)}
        made = [
            _Pack(index, params, self._scratch_like(params[0]))
            for index, group in enumerate(self.optimizer.param_groups)
            if not (group.get("fused") or group.get("capturable") or group.get("differentiable"))
            for params in self._alike(param for param in group["params"] if id(param) in dense)
        ]
        for pack in made:
            self._take_away(pack)
            self._packed.update(map(id, pack.params))
        self._packs += made
        self._all_packed = len(self._packed) == sum(len(group["params"]) for group in self.optimizer.param_groups)
        self._given_up = self._last_loose = now - self._packed
        return bool(made)

    def _scratch_like(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Room for one pack's values and gradients."""
        kind = param.dtype, param.device
        if kind not in self._scratch:
            room = torch.empty(_PACK_NUMEL, dtype=param.dtype, device=param.device)
            self._scratch[kind] = room, torch.empty_like(room)
        return self._scratch[kind]

    def _alike(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """`params` in lists of two or more that one flat tensor can stand for."""
        alike: defaultdict[Hashable, list[list[Tensor]]] = defaultdict(list)
        for param in params:
            likeness = _likeness(param, self.optimizer.state.get(param, {}))
            if likeness is None:
                continue
            runs = alike[likeness]
            if not runs or sum(map(Tensor.numel, runs[-1])) + param.numel() > _PACK_NUMEL:
                runs.append([])
            runs[-1].append(param)
        return [run for runs in alike.values() for run in runs if len(run) > 1]

    def _take_away(self, pack: _Pack) -> None:
        """Move the members' state from the plain optimizer into the shadow."""
        states = [self.optimizer.state.pop(param, {}) for param in pack.params]
        if self._shadow is None:
            self._shadow = copy.copy(self.optimizer)
            self._shadow.state = defaultdict(dict)
        first = states[0]
        if first:
            self._shadow.state[pack.flat] = {
                key: torch.cat([state[key].reshape(-1) for state in states])
                if isinstance(value, Tensor) and value.dim()
                else value
                for key, value in first.items()
            }

    def _bring_home(self, pack: _Pack) -> None:
        """Move the members' state from the shadow back into the plain optimizer."""
        assert self._shadow is not None, "a pack exists, so its shadow does"
        flat_state = self._shadow.state.pop(pack.flat, {})
        states: list[dict[str, Any]] = [{} for _ in pack.params]
        for key, value in flat_state.items():
            if isinstance(value, Tensor) and value.dim():
                pieces: list[Any] = [piece.clone() for piece in pack.cut(value)]
            else:
                pieces = [copy.deepcopy(value) for _ in states]
            for state, piece in zip(states, pieces, strict=True):
                state[key] = piece
        for param, state in zip(pack.params, states, strict=True):
            if state:
                self.optimizer.state[param] = state

    def _step_packs(self, packed: list[tuple[_Pack, list[Tensor]]]) -> None:
        assert self._shadow is not None, "a pack exists, so its shadow does"
        groups = self.optimizer.param_groups
        # One pack from beginning to end before the next: they share the scratch, which stays in the cache.
        for pack, grads in packed:
            group = groups[pack.group]
            buffer = self._shadow.state.get(pack.flat, {}).get("momentum_buffer")
            # A buffer without momentum is what is left of a group whose momentum was set to 0.
            if buffer is not None and type(self.optimizer) is optim.SGD and group["momentum"] and not _has_extras(group):
                _step_momentum(pack, grads, group, buffer)
                continue
            # Parameters are read anew at every step: other optimizers and their users write to them too.
            torch._foreach_copy_(pack.values, pack.params)
            torch._foreach_copy_(pack.grads, grads)
            self._shadow.param_groups = [{**group, "params": [pack.flat]}]
            self._shadow.step()
            torch._foreach_copy_(pack.params, pack.values)

    def _step_loose(self, loose: list[tuple[Tensor, Tensor]]) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        found = [param.grad for param in params]
        try:
            for param, grad in zip(params, found, strict=True):
                if grad is not None:
                    param.grad = None
            for param, grad in loose:
                param.grad = grad
            self.optimizer.step()
        finally:
            for param, grad in zip(params, found, strict=True):
                param.grad = grad


def _has_own_ways(optimizer: Optimizer) -> bool:
    """Whether this one object does more in a step than its class: hooks of its own, or a method in the place of `step`."""
    return bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or "step" in vars(optimizer)
    )


def _has_extras(group: Mapping[str, Any]) -> bool:
    """Whether a group of SGD does more than to follow the gradient or its momentum."""
    return bool(
        group["weight_decay"]
        or group["nesterov"]
        or group["maximize"]
        or group["differentiable"]
        or group["fused"]
        or isinstance(group["lr"], Tensor)
    )


def _step_momentum(pack: _Pack, grads: list[Tensor], group: Mapping[str, Any], buffer: Tensor) -> None:
    """What SGD with momentum does, with only its buffer packed: neither parameters nor gradients are copied."""
    pieces = pack.momentum(buffer)
    buffer.mul_(group["momentum"])
    torch._foreach_add_(pieces, grads, alpha=1 - group["dampening"])
    torch._foreach_add_(pack.params, pieces, alpha=-group["lr"])


def _is_dense(grad: Tensor | None) -> TypeGuard[Tensor]:
    return grad is not None and grad.layout is torch.strided


def _likeness(param: Tensor, state: Mapping[str, Any]) -> Hashable | None:
    """Equal for parameters that may share a pack; None for one that cannot be packed.

    A scalar of the state (a step count) is one value for the whole pack, so its value must agree. A
    parameter without dimensions is left alone: its state could not be told from such a scalar.
    """
    packable = (
        type(param) in (Tensor, torch.nn.Parameter)
        and param.dtype in _DTYPES
        and param.is_contiguous()
        and 0 < param.dim()
        and 0 < param.numel() <= _MEMBER_NUMEL
    )
    if not packable:
        return None
    scalars: list[tuple[str, Any]] = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            scalars.append((key, (value.dtype, value.item())))
        elif isinstance(value, Tensor) and value.shape == param.shape:
            scalars.append((key, (value.dtype, "elementwise")))
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars.append((key, value))
        else:
            return None
    return (param.dtype, param.device, tuple(scalars))
