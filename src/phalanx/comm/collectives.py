"""The interface through which everything above `comm` moves data between ranks.

The reducer, ZeRO and the hooks know these five verbs and nothing of process groups, sockets or
segments. Each verb starts a collective and returns a `Work`; collectives of one `Collectives`
run in the order in which they were started, on every rank the same order. `wait`, which ends each of
them, is in `failure/waiter.py`, but for transports that wait otherwise.
"""

from __future__ import annotations

import abc
from functools import cached_property

import torch
import torch.distributed as dist

from ..errors import CommunicationError, MismatchError
from .failure.agreement import Settings, agreement_of
from .failure.board import FailureBoard, board_of
from .failure.waiter import Waiter
from .ranks import Ranks, ranks_of
from .work import Work

__all__ = ["Collectives", "Work", "as_real"]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or pairs of reals over the same memory: backends add only reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Collectives(Waiter, abc.ABC):
    """Collectives over one fixed set of ranks, and the waiting for them. A kind of them has no need to call `Waiter`'s
    constructor: the board is found by the group.

    `fuses_scale` says that `all_reduce` and `reduce_scatter` apply `scale` at no extra pass over
    memory; a caller who has to touch the data anyway scales it himself where it is false.
    `worthwhile_buckets` is into how many buckets at least a model is best cut where nobody asked for a size: several where a
    collective mostly waits, one where it mostly works.
    """

    rank: int
    world: int
    group: dist.ProcessGroup
    fuses_scale: bool = False
    worthwhile_buckets: int = 2

    @cached_property
    def ranks(self) -> Ranks:
        """How messages name the ranks of the group: whatever is said to a user names no other numbers."""
        return ranks_of(self.group)

    @property
    def me(self) -> str:
        """This rank, as a message of it begins."""
        return self.ranks.me

    # Made when first asked for, because many a `Collectives` is asked for its verbs only, and it reads the group's store
    # and options. It does not refer back to this object, so that it is freed with its last user.
    @cached_property
    def board(self) -> FailureBoard:
        """Where ranks of this group leave their errors for the others."""
        return board_of(self.group)

    def barrier(self, where: str) -> None:
        """Return when every rank has come here."""
        self.all_reduce_now(torch.zeros(1, dtype=torch.float32, device="cpu"), where)  # whatever torch's defaults are

    def all_reduce_now(self, tensor: torch.Tensor, where: str) -> None:
        """`all_reduce` and `wait` in one, for what is waited for at once, such as a vote."""
        self.wait(self.all_reduce(tensor), where)

    def take_failure(self) -> BaseException | None:
        """The first error of a collective that was started on the group since the last call, where that is known."""
        return None

    def agree(self, occasion: str, settings: Settings, changed: str = "") -> None:
        """Raise MismatchError on every rank, naming what differs and where, unless all ranks give equal `settings`.

        `changed` says why this rank asks, for the case that it asks alone. Every rank calls it at the same point. For what
        is set once or changes rarely: it waits for the slowest rank.
        """
        if self.world > 1 and self.board.reaches_others:
            agreement_of(self.board).agree(occasion, settings, self._nobody_comes, changed)

    def comes_to(self, what: str, numel: int = 0) -> None:  # nothing to do where the transport compares
        """This rank is about to start `what`, a collective of torch's own on the group; every rank calls it.

        Raises MismatchError if the others come to something else, where that would not be noticed by the transport.
        """

    def refuse(self, error: MismatchError) -> None:
        """Before raising `error`, which this rank alone has found out: the others, who may wait for it, raise as well."""
        self.board.post_error(error)

    def _nobody_comes(self, where: str, silent: bool) -> CommunicationError:
        return self.explain(TimeoutError("no answer"), where, silent)

    @abc.abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor placed where this transport is fastest. Local, no agreement needed.

        Memory is given back when the tensor and all its views are gone.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0, waits_next: bool = False) -> Work:
        """Replace `tensor` on every rank by scale × the sum over ranks. Bit-identical everywhere.

        With `waits_next` the caller does nothing else before it waits: some transports then need no other thread.
        """

    @abc.abstractmethod
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        """Give rank r the r-th equal slice of scale × the sum of `input` over ranks.

        `output` may be that slice of `input` itself. What the rest of `input` holds afterwards is undefined.
        """

    @abc.abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Fill the r-th equal slice of `output` with rank r's `input`, which may be that slice."""

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor, waits_next: bool = False) -> Work:
        """The same, of a size that the ranks have just told each other: nobody compares it before it starts."""
        return self.all_gather(output, input)

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Replace `tensor` on every rank by that of rank `source` of this group."""
