"""Optimizers that step during backward: told by the reducer when means are there, and compared between the ranks.

Each rank steps its own copy of the parameters by its own optimizers, so that one that differs makes the ranks drift apart.
The wrapper knows of these optimizers, unlike of a plain one that the user steps, and compares them:

    taken over      class and options per parameter, in words, in the first backward after it
    in each pass    the learning rates, as bits in the tail (`settings`); not under join, whose end makes the ranks equal

Must not know how an optimizer steps.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...optim.in_backward import in_backward_optimizers
from ...optim.options import comparable, own_options
from ..buckets.bucket import Bucket
from ..passes.listener import Listener
from .settings import carry
from .torch_in_backward import TorchInBackward, torch_in_backward

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


class SteppedInBackward(Protocol):
    """An optimizer that steps parameters as soon as their gradients are final."""

    max_norm: float | None

    def hand_over(self, params: Collection[torch.nn.Parameter]) -> None:
        """Stop stepping `params` from hooks of its own, which see gradients that are not averaged."""

    def gradients_ready(self, params: Iterable[torch.nn.Parameter]) -> None:
        """These parameters hold their mean."""

    def backward_ended(self) -> None:
        """All of them do."""

    def backward_raised(self) -> None:
        """They never will: the pass has failed."""

    def optimizers_of(self, param: torch.nn.Parameter) -> Sequence[torch.optim.Optimizer]:
        """Those that step this parameter, each of one group."""


class StepInBackward(Listener):
    """Steps a bucket's parameters when they have been given their mean."""

    uses_means = True

    def __init__(self, optimizer: SteppedInBackward, params: Collection[torch.nn.Parameter]) -> None:
        optimizer.hand_over(params)
        self.optimizer = optimizer

    def bucket_given(self, bucket: Bucket) -> None:
        self.optimizer.gradients_ready(bucket.params)

    def pass_ended(self) -> None:
        self.optimizer.backward_ended()

    def pass_failed(self) -> None:
        self.optimizer.backward_raised()


class CommonOptimizers:
    """What the ranks must have in common of the optimizers that one wrapper steps (`settings.Teller`)."""

    def __init__(self, ddp: DistributedDataParallel, stepped: Sequence[SteppedInBackward]) -> None:
        self._ddp = weakref.ref(ddp)  # whose reducer keeps this
        reducer = ddp.reducer
        self._groups: list[tuple[str, dict[str, Any]]] = []
        self.words: dict[str, str] = {}
        """Class and options, as they are now."""
        params = []
        for param, spec in zip(reducer.params, reducer.plan.specs, strict=True):
            said = []
            for one in stepped:
                for optimizer in one.optimizers_of(param):
                    self._groups.append((spec.name, optimizer.param_groups[0]))
                    said.append(_in_words(optimizer, one.max_norm))
            if said:
                params.append(param)
                self.words[f"optimizer in backward of '{spec.name}'"] = " and ".join(said)
        self.params = frozenset(map(id, params))
        self._rates: tuple[Any, ...] = ()
        self._number = 0

    def prepare(self, joined: bool) -> None:
        """Nothing is exchanged before a pass."""

    def tell(self) -> int:
        """A number made of the learning rates."""
        ddp = self._ddp()
        if ddp is None or ddp._join_config.enable:
            # A rank that has joined keeps the rate of its own last step, and takes over the others' parameters at the end.
            return 0
        rates = tuple([comparable(group.get("lr")) for _, group in self._groups])
        if rates != self._rates:
            self._rates, self._number = rates, zlib.crc32(repr(rates).encode())
        return self._number

    def settings(self) -> dict[str, str]:
        """The rates that were told last, in words."""
        names = [f"lr in backward of '{name}'" for name, _ in self._groups]
        return {name: repr(rate) for name, rate in zip(names, self._rates, strict=False)}

    def all_have(self, told: int) -> None:
        """Nothing depends on it."""


def adopt(ddp: DistributedDataParallel) -> None:
    """Have the reducer step whatever steps its parameters in backward, and compare it with the other ranks'.

    May be called again, between two passes: what has been taken over already stays as it is.
    """
    reducer = ddp.reducer
    taken = [listener.optimizer for listener in reducer.listeners if isinstance(listener, StepInBackward)]
    known = set(map(id, taken))
    of_torch = {id(param) for one in taken if isinstance(one, TorchInBackward) for param in one.params}
    found: list[SteppedInBackward] = [one for one in in_backward_optimizers(reducer.params) if id(one) not in known]
    found += torch_in_backward(param for param in reducer.params if id(param) not in of_torch)
    if not found:
        return
    reducer.listeners.add(*(StepInBackward(one, reducer.params) for one in found))
    common = CommonOptimizers(ddp, [*taken, *found])
    carry(reducer, common, common.words)


def _in_words(optimizer: torch.optim.Optimizer, max_norm: float | None) -> str:
    group = optimizer.param_groups[0]
    options = ", ".join(f"{name}={comparable(group[name])!r}" for name in own_options(optimizer) if name in group)
    limit = "" if max_norm is None else f", max_norm={float(max_norm)}"
    return f"{type(optimizer).__name__}({options}{limit})"
