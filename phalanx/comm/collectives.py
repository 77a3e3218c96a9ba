"""The interface through which everything above `comm` moves data between ranks.

The reducer, ZeRO and the hooks know these five verbs and nothing of process groups, sockets or
segments. Each verb starts a collective and returns a `Work`; collectives of one `Collectives`
run in the order in which they were started, on every rank the same order.
"""

from __future__ import annotations

import abc
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective under way. c10d's own works satisfy this as they are."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until the result is in place; raise what went wrong."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, for those who chain on it."""


class Collectives(abc.ABC):
    """Collectives over one fixed set of ranks.

    `fuses_scale` says that `all_reduce` and `reduce_scatter` apply `scale` at no extra pass over
    memory; a caller who has to touch the data anyway scales it himself where it is false.
    `names_failures` says that a work's `wait` raises by itself, soon and naming the rank, when a rank
    dies or stays silent; elsewhere the caller asks the blackboard while it waits. `worthwhile_buckets` is
    into how many buckets at least a model is best cut where nobody asked for a size: several where a
    collective mostly waits, one where it mostly works.
    """

    rank: int
    world: int
    group: dist.ProcessGroup
    fuses_scale: bool = False
    names_failures: bool = False
    worthwhile_buckets: int = 2

    @abc.abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor placed where this transport is fastest. Local, no agreement needed.

        Memory is given back when the tensor and all its views are gone.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        """Replace `tensor` on every rank by scale × the sum over ranks. Bit-identical everywhere."""

    @abc.abstractmethod
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        """Give rank r the r-th equal slice of scale × the sum of `input` over ranks.

        `output` may be that slice of `input` itself.
        """

    @abc.abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Fill the r-th equal slice of `output` with rank r's `input`, which may be that slice."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Replace `tensor` on every rank by that of rank `source` of this group."""
