"""Who owns what: the interface that the element and the parameter partition share.

A partition is made anew whenever the parameters or the plan change, and thrown away whole; whoever makes a
new one moves the state (`state.transfer`). Must not know of steps in backward, nor of saving.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.collectives import Collectives
from ...plan.shards import Ownership
from .local import LocalOptimizer
from .param_table import ParamTable


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A tensor of the local optimizer: elements [start, stop) of parameter `index`, owned by this rank.

    The tensor covers [begin, end) and has the given shape and strides; `key` is the tensor itself, under
    which the optimizer keeps its state.
    """

    # Half-open ranges of flat elements. Both are needed: state of [begin, end) that other ranks own is computed here too,
    # but it is not kept up to date with theirs, and must never be sent or saved.
    index: int
    start: int
    stop: int
    begin: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    key: torch.Tensor


class Partition(abc.ABC):
    """One way to divide the parameters of `table` among the ranks of `collectives`.

    Its own `table` has the order in which it counts the elements of each parameter, which may be another than was given.
    """

    # As the user writes it in `partition=`.
    name: str

    def __init__(self, table: ParamTable, collectives: Collectives) -> None:
        self.table = table
        self.collectives = collectives

    @property
    @abc.abstractmethod
    def ownership(self) -> Ownership:
        """Of each parameter, who owns which elements; the same on all ranks."""

    @property
    @abc.abstractmethod
    def owned(self) -> list[OwnedTensor]:
        """What this rank owns, in the order of the parameters within each bucket."""

    @abc.abstractmethod
    def step(self, local: LocalOptimizer, closure: Any, arguments: dict[str, Any]) -> Any:
        """Step this rank's part on the parameters' `.grad`, and make parameters equal on all ranks.

        Returns what the optimizer returned. Every rank calls it at the same point.
        """

    def params_by_group(self) -> list[list[torch.Tensor]]:
        """The tensors of the local optimizer, by group."""
        return self.table.by_group((owned.index, owned.key) for owned in self.owned)


def evaluate(closure: Any) -> Any:
    """What a closure returns, evaluated as optimizers do that evaluate it once; None where there is none."""
    if not callable(closure):
        return None
    with torch.enable_grad():
        return closure()
