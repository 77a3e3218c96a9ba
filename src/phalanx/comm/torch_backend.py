"""Collectives over any c10d process group: gloo, nccl, mpi, ucc, or one registered by others.

Adds nothing to the transport. Must not know of gradients, buckets or steps.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from ..errors import CommunicationError, PhalanxError
from .collectives import Collectives, Work, as_real
from .failure.agreement import StoreAgreement, agreement_of
from .group.process_group import collectives_of
from .memory.pages import zeros_in_pages
from .work import started


class TorchCollectives(Collectives):
    """Collectives by the public functions of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        # Asked of the group itself: torch.distributed knows only those that it made.
        self.rank = group.rank()
        self.world = group.size()

    def _launches(self, verb: str, tensor: torch.Tensor, root: int = -1) -> None:
        """Compare the first collective of each kind with that of the other ranks: the transport would not."""
        if self.world > 1 and self.board.reaches_others:
            self._agreement.launches(verb, tensor, root, self._nobody_comes)

    def comes_to(self, what: str, numel: int = 0) -> None:
        if self.world > 1 and self.board.reaches_others:
            self._agreement.comes_to((what, numel, None, -1), self._nobody_comes)

    @cached_property
    def _agreement(self) -> StoreAgreement:
        return agreement_of(self.board)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return zeros_in_pages(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # Scaling first keeps half-precision sums in range, whatever the number of ranks.
            tensor.mul_(scale)
        self._launches("all_reduce", tensor)
        return started(dist.all_reduce(as_real(tensor), group=self.group, async_op=True), tensor)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            # In place, which `Collectives` allows: a copy would cost a pass over memory and the memory itself.
            input.mul_(scale)
        self._launches("reduce_scatter", input)
        work = dist.reduce_scatter_single(as_real(output), as_real(input), group=self.group, async_op=True)
        return started(work, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        self._launches("all_gather", output)
        return self.all_gather_told(output, input)

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        work = dist.all_gather_single(as_real(output), as_real(input), group=self.group, async_op=True)
        return started(work, output)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._launches("broadcast", tensor, source)
        return self._broadcast(tensor, source)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return started(dist.broadcast(as_real(tensor), group=self.group, group_src=source, async_op=True), tensor)


class UnregisteredCollectives(TorchCollectives):
    """Collectives of a group that somebody made and did not register with torch.distributed (torchft's are such).

    Uses only what torch's own wrapper asks of a group: `allreduce`, `broadcast` and `allgather` of lists.
    """

    def wait(self, work: Work, where: str) -> None:
        """Return when `work` is done. Without a limit of ours: works made from futures know no wait with one."""
        try:
            work.wait()
        except PhalanxError:
            raise
        except RuntimeError as error:
            raise CommunicationError(f"{self.me}: {where}: {error}") from error

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        whole = as_real(input).clone()
        if scale != 1.0:
            whole.mul_(scale)
        work = started(dist.all_reduce(whole, group=self.group, async_op=True), whole)
        mine = whole.view(-1).chunk(self.world)[self.rank]
        return SlicedWork(work, mine, as_real(output).view(-1))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self.all_gather_told(output, input)

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        parts = list(as_real(output).view(-1).chunk(self.world))
        # By this signature: such groups may be written in Python, and have one of c10d's several.
        return started(self.group.allgather([parts], [as_real(input).view(-1)], AllgatherOptions()), output)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        options = BroadcastOptions()
        options.rootRank = source
        return started(self.group.broadcast([as_real(tensor)], options), tensor)


class SlicedWork:
    """A work of which one rank wants a slice."""

    def __init__(self, work: Work, slice_: torch.Tensor, output: torch.Tensor) -> None:
        self._work = work
        self._slice = slice_
        self._output = output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the slice is in place. May be called again: the same slice is copied once more."""
        # A limit only if one is given: see `UnregisteredCollectives.wait`.
        self._work.wait(timeout) if timeout else self._work.wait()
        self._output.copy_(self._slice)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """The output, in a list, once it is in place."""

        def copied(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()
            self._output.copy_(self._slice)
            return [self._output]

        return self._work.get_future().then(copied)


def backend_of(group: dist.ProcessGroup) -> str | None:
    """The name of the group's backend as torch.distributed knows it; None for a group that it has not made."""
    try:
        return dist.get_backend(group)
    except ValueError:
        return None


def collectives_for(group: dist.ProcessGroup) -> Collectives:
    """The fastest collectives that this group offers."""
    direct = collectives_of(group)
    if direct is not None:
        return direct
    backend = backend_of(group)
    if backend is None:
        return UnregisteredCollectives(group)
    if backend == dist.Backend.GLOO:
        # Here and not above: GlooCollectives derives from the class in this module.
        from .gloo import GlooCollectives

        return GlooCollectives(group)
    return TorchCollectives(group)
