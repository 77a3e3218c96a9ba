"""Collectives over any c10d process group: gloo, nccl, mpi, ucc, or one registered by others.

Adds nothing to the transport, but for gloo, two of whose five verbs are made from others that it does better.
Gloo's reduce-scatter is an all-reduce of which most is thrown away, and its ring gather waits for one neighbour
at a time. For large tensors we exchange slices all to all and add them up here (half the traffic), and gather
by one broadcast per rank, all under way together. Two ranks, 24 MB, milliseconds: reduce-scatter 29 → 14,
gather 14 → 8.

Must not know of gradients, buckets or steps.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from ..errors import CommunicationError, PhalanxError
from .collectives import Collectives, Work, as_real
from .failure.agreement import StoreAgreement, agreement_of
from .failure.board import FailureBoard, board_of
from .failure.cuttable import has_lost
from .group.direct import collectives_of
from .memory.pages import zeros_in_pages

# Below this, the latency of several messages costs more than their traffic saves.
_LARGE_BYTES = 64 * 1024
# With more ranks, gathering by broadcasts keeps too many messages under way.
_MOST_BROADCASTS = 8
_MOST_SPARE = 3

_NO_LIMIT = timedelta(0)  # as c10d says it


def started(work: Any, tensor: torch.Tensor) -> Work:
    """What c10d has launched for `tensor`, as `Collectives.wait` may wait for it: on a device without a time limit."""
    launched: Work = work  # c10d's functions return None on ranks outside the group, where none of ours is ever called
    return launched if tensor.device.type == "cpu" else StreamWork(launched)


class StreamWork:
    """A collective on a device. To wait for it orders the current stream after it; the host goes on.

    Without a time limit: NCCL's blocks the host, counts from the launch, and aborts the communicator when it is over. A rank
    that died or stays silent is found out where the host waits for the device at all (`Waiter.wait_until`).
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> Any:
        """Order the current stream after the collective. The limit is not passed on."""
        return self._work.wait()

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future, which orders streams when it is waited for."""
        return self._work.get_future()


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

    def announce(self, verb: str, numel: int, dtype: torch.dtype | None, root: int) -> None:
        """The same, of a collective of torch's own that a user is about to start on the group."""
        if self.board.reaches_others:
            self._agreement.comes_to((verb, numel, dtype, root), self._nobody_comes)

    @cached_property
    def _agreement(self) -> StoreAgreement:
        return agreement_of(self.board)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return zeros_in_pages(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0, waits_next: bool = False) -> Work:
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

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor, waits_next: bool = False) -> Work:
        work = dist.all_gather_single(as_real(output), as_real(input), group=self.group, async_op=True)
        return started(work, output)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._launches("broadcast", tensor, source)
        return self._broadcast(tensor, source)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return started(dist.broadcast(as_real(tensor), group=self.group, group_src=source, async_op=True), tensor)


# -- gloo ------------------------------------------------------------------------------------------


def _is_cut_off(known: Callable[[], dist.ProcessGroup | None], place: int) -> bool:
    """Whether gloo has lost the connection to a rank: to ask for a message from it is refused at once then.

    For one who waits in the store, where nothing is under way that would be broken off.
    """
    group: Any = known()
    if group is None or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return False  # gloo would now begin to connect, and wait for that
    return has_lost(group, place)


class GlooCollectives(TorchCollectives):
    """Collectives of one gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._spares = Spares()

    @cached_property
    def board(self) -> FailureBoard:
        """As of any collectives; it asks gloo about ranks of which it knows nothing."""
        board = board_of(self.group)
        board.is_cut_off = partial(_is_cut_off, weakref.ref(self.group))  # weak: the board goes with its group
        return board

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        if scale != 1.0:
            input.mul_(scale)
        output, input = as_real(output).view(-1), as_real(input).view(-1)
        if self.world == 1:
            output.copy_(input)
            return SeveralWorks([])
        self._launches("reduce_scatter", input)
        own = None
        if self.world == 2:
            # What stays here need not be sent: half the memory, and no copy of it.
            slices, peer = input.view(2, -1), 1 - self.rank
            own, input = slices[self.rank], slices[peer]
        received = self._spares.take(input)
        sizes = None if own is None else [0 if rank == self.rank else input.numel() for rank in range(2)]
        work = dist.all_to_all_single(received, input, sizes, sizes, group=self.group, async_op=True)
        return SummedExchange(work, received, own, output, self._spares)

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor, waits_next: bool = False) -> Work:
        num_bytes = output.numel() * output.element_size()
        if num_bytes < _LARGE_BYTES or not 1 < self.world <= _MOST_BROADCASTS:
            return super().all_gather_told(output, input)
        parts = output.view(self.world, -1)
        if input.data_ptr() != parts[self.rank].data_ptr():
            parts[self.rank].copy_(input.view(-1))
        return SeveralWorks([self._broadcast(part, source) for source, part in enumerate(parts)])


class Spares:
    """Receive buffers to use again: fresh memory costs more, page by page, than what is received into it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the size and dtype of `like`, contents undefined."""
        if like.device.type != "cpu":
            return torch.empty_like(like)
        num_bytes = like.numel() * like.element_size()
        with self._lock:
            fitting = [spare for spare in self._free if spare.numel() >= num_bytes]
            if fitting:
                spare = min(fitting, key=torch.Tensor.numel)
                self._free = [other for other in self._free if other is not spare]
            else:
                spare = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return spare[:num_bytes].view(like.dtype)

    def give(self, taken: torch.Tensor) -> None:
        """Take back what `take` gave; the largest few are kept."""
        if taken.device.type != "cpu":
            return
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(taken.untyped_storage())
        with self._lock:
            self._free = sorted([*self._free, whole], key=torch.Tensor.numel)[-_MOST_SPARE:]


class SummedExchange:
    """An exchange of slices under way; whoever looks first after it has ended adds them up."""

    def __init__(
        self, work: Any, received: torch.Tensor, own: torch.Tensor | None, output: torch.Tensor, spares: Spares
    ) -> None:
        """`received` are everybody's slices in the order of ranks, or the only other rank's if `own` is given."""
        self._work = work
        self._received: torch.Tensor | None = received
        self._own = own
        self._output = output
        self._spares = spares
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the sum is in place."""
        self._work.wait(timeout)
        self._add_up()
        return True

    def is_completed(self) -> bool:
        """Whether everything has been received."""
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the sum in place."""
        return self._work.get_future().then(self._then)  # type: ignore[no-any-return]

    def _then(self, future: torch.futures.Future[Any]) -> list[torch.Tensor]:
        future.value()
        self._add_up()
        return [self._output]

    def _add_up(self) -> None:
        with self._lock:
            received, self._received = self._received, None
            if received is None:
                return
            parts = received.view(-1, self._output.numel())
            if self._own is not None:
                # Of two, the order does not matter.
                torch.add(self._own, parts[0], out=self._output)
            elif parts.dtype.itemsize < 4 and len(parts) > 2:
                torch.sum(parts, 0, out=self._output)  # in single precision, rounded once
            else:
                # In the order of ranks, whoever adds.
                torch.add(parts[0], parts[1], out=self._output)
                for part in parts[2:]:
                    self._output.add_(part)
            self._spares.give(received)


class SeveralWorks:
    """Several collectives that are one to the caller."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until all have ended; `timeout` holds for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes when all have."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


# -- a group that torch.distributed has not made ---------------------------------------------------


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

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor, waits_next: bool = False) -> Work:
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
        return GlooCollectives(group)
    return TorchCollectives(group)
