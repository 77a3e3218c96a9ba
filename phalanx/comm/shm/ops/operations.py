"""The blocking collectives of a group, one interface for one host and for several.

An `Operations` is driven by one thread at a time, in the same order on all ranks. Tensors are flat,
contiguous and in ordinary memory or in the segment. Ranks are those of the group.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch

from ....errors import CommunicationError, MismatchError
from ..transport.signature import ANY_ROOT, ReduceOp
from ..transport.staging import StagingBuffer
from ..transport.team import Team
from .copy import CopyOperations
from .reduce import ReduceOperations


class Operations(abc.ABC):
    """What every transport of a phalanx group can do. Each call returns when its result is in place."""

    rank: int
    world: int
    name: int  # this rank as messages call it

    @abc.abstractmethod
    def barrier(self, timeout: timedelta) -> None:
        """Return when all ranks have called this."""

    @abc.abstractmethod
    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, scale: float, timeout: timedelta
    ) -> None:
        """Replace `tensor` on every rank by scale × the reduction over ranks."""

    @abc.abstractmethod
    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp, scale: float, timeout: timedelta
    ) -> None:
        """Replace `tensor` on rank `root` by scale × the reduction over ranks."""

    @abc.abstractmethod
    def reduce_scatter(
        self,
        output: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        whole: torch.Tensor | None,
        op: ReduceOp,
        scale: float,
        timeout: timedelta,
    ) -> None:
        """Write scale × the reduction of everybody's piece `rank` to `output`, which may be that piece.

        `whole` is the tensor of which `pieces` are the successive parts, if there is one.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> None:
        """Replace `tensor` by that of rank `root`."""

    @abc.abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, timeout: timedelta) -> None:
        """Fill `outputs[r]` with rank r's `input`. Sizes may differ; `outputs[rank]` may be `input`."""

    @abc.abstractmethod
    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout: timedelta
    ) -> None:
        """Fill `outputs[r]` with what rank r has in `inputs[rank]`. Sizes may all differ."""

    @abc.abstractmethod
    def break_(self, error: CommunicationError) -> None:
        """Make the collective under way, and all to come, raise; tell the other ranks. Any thread."""

    @abc.abstractmethod
    def leave(self, reason: CommunicationError) -> None:
        """Say farewell to the others, and make what is under way here raise `reason`. Any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. No collective may be under way."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Close descriptors inherited by a forked child: peers must see the parent's end, not the child's."""


class HostOperations(Operations):
    """The collectives of ranks that all share one host."""

    def __init__(self, team: Team) -> None:
        self.rank = team.index
        self.world = team.size
        self.name = team.global_ranks[team.index]
        self.team = team
        staging = StagingBuffer(team)
        self._reduce = ReduceOperations(team, staging)
        self._copy = CopyOperations(team, staging)

    def barrier(self, timeout: timedelta) -> None:
        with self._whole_or_broken():
            self._copy.barrier(timeout)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, scale: float, timeout: timedelta
    ) -> None:
        with self._whole_or_broken(tensor):
            self._reduce.all_reduce(tensor, op, scale, timeout)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp, scale: float, timeout: timedelta
    ) -> None:
        with self._whole_or_broken():
            self._reduce.reduce(tensor, root, op, scale, timeout)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        whole: torch.Tensor | None,
        op: ReduceOp,
        scale: float,
        timeout: timedelta,
    ) -> None:
        with self._whole_or_broken():
            self._reduce.reduce_scatter(output, pieces, whole, op, scale, timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> None:
        with self._whole_or_broken():
            self._copy.broadcast(tensor, root, timeout)

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, timeout: timedelta) -> None:
        sizes = tuple(output.numel() * output.dtype.itemsize for output in outputs)
        with self._whole_or_broken():
            self._copy.all_gather(outputs, sizes, input, ANY_ROOT, timeout)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        sizes: tuple[int, ...],
        input: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> None:
        """Fill `outputs[r]` with rank r's `input` on `root`; the others have no outputs.

        `sizes` are everybody's numbers of bytes.
        """
        with self._whole_or_broken():
            self._copy.all_gather(outputs, sizes, input, root, timeout)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout: timedelta
    ) -> None:
        with self._whole_or_broken():
            self._copy.all_to_all(outputs, inputs, timeout)

    def break_(self, error: CommunicationError) -> None:
        self.team.watch.break_(error)

    def leave(self, reason: CommunicationError) -> None:
        self.team.watch.leave(reason)

    def close(self) -> None:
        self.team.close()

    def abandon(self) -> None:
        self.team.close()

    @contextmanager
    def _whole_or_broken(self, written_by_peers: torch.Tensor | None = None) -> Iterator[None]:
        """Break the team if a collective ends halfway: ranks out of step would mix up their data."""
        try:
            yield
        except MismatchError:
            raise  # noticed by all ranks at the same step
        except BaseException as error:
            self.team.fail(error)
            offset = None if written_by_peers is None else self.team.memory.locate(written_by_peers)
            if offset is not None:
                self.team.memory.retire(offset)
            raise
