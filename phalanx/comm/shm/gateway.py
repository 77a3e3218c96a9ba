"""Where torch's tensors enter: any shape and stride in, flat tensors to the engine, in lane order.

A `Gateway` is one group's engine and lane with everything a caller may hand over made fit for them.
It is shared by the c10d backend and by the direct path of the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.comm.shm.engine import Engine
from phalanx.comm.shm.lane import Lane
from phalanx.comm.shm.reduction import Reduction
from phalanx.errors import CommunicationError

UNSET = timedelta(milliseconds=-1)  # c10d's sign for "the group's own time limit"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a flat tensor: the same memory if they lie in order, a copy if not.

    `data` rather than `detach`: a collective is no operation of autograd, and counts as no change
    of the tensor, as with any other backend.
    """
    data = tensor.data
    return data.view(-1) if data.is_contiguous() else data.contiguous().view(-1)


def _restore(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Put the elements back if `_flat` copied them."""
    if not tensor.is_contiguous():
        tensor.data.copy_(flat.view(tensor.shape))


class Gateway:
    """The collectives of one group on tensors of any form, `blocking` or as a work to wait for."""

    def __init__(self, engine: Engine, timeout: timedelta, name: str) -> None:
        self.engine = engine
        self.timeout = timeout
        self.lane = Lane(f"phalanx-lane-{name}")
        self._is_open = True

    def barrier(self, blocking: bool, timeout: timedelta = UNSET) -> dist.Work:
        """Meet all ranks."""
        limit = self._limit(timeout)
        return self._go("barrier", lambda: self.engine.barrier(limit), [], blocking)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        reduction: Reduction,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Replace `tensor` by scale × the reduction over ranks."""
        limit = self._limit(timeout)

        def run() -> None:
            flat = _flat(tensor)
            self.engine.all_reduce(flat, reduction, scale, limit)
            _restore(tensor, flat)

        return self._go("all_reduce", run, [tensor], blocking)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        reduction: Reduction,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Replace `tensor` on `root` by scale × the reduction over ranks."""
        limit = self._limit(timeout)

        def run() -> None:
            flat = _flat(tensor)
            self.engine.reduce(flat, root, reduction, scale, limit)
            if root == self.engine.rank:
                _restore(tensor, flat)

        return self._go("reduce", run, [tensor], blocking)

    def broadcast(
        self, tensor: torch.Tensor, root: int, blocking: bool, timeout: timedelta = UNSET
    ) -> dist.Work:
        """Replace `tensor` by that of `root`."""
        limit = self._limit(timeout)

        def run() -> None:
            flat = _flat(tensor)
            self.engine.broadcast(flat, root, limit)
            if root != self.engine.rank:
                _restore(tensor, flat)

        return self._go("broadcast", run, [tensor], blocking)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        blocking: bool,
        timeout: timedelta = UNSET,
        result: list[torch.Tensor] | None = None,
    ) -> dist.Work:
        """Fill `outputs[r]` with rank r's `input`."""
        limit = self._limit(timeout)

        def run() -> None:
            flats = [_flat(output) for output in outputs]
            self.engine.all_gather(flats, _flat(input), limit)
            for output, flat in zip(outputs, flats, strict=True):
                _restore(output, flat)

        return self._go("all_gather", run, list(outputs) if result is None else result, blocking)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | torch.Tensor,
        reduction: Reduction,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Write scale × the reduction of everybody's `rank`-th input to `output`.

        One tensor in place of several stands for its equal successive parts.
        """
        limit = self._limit(timeout)

        def run() -> None:
            whole = None
            if isinstance(inputs, torch.Tensor):
                whole = _flat(inputs)
                pieces = parts(whole, self.engine.world)
            else:
                pieces = [_flat(piece) for piece in inputs]
            flat = _flat(output)
            self.engine.reduce_scatter(flat, pieces, whole, reduction, scale, limit)
            _restore(output, flat)

        return self._go("reduce_scatter", run, [output], blocking)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        blocking: bool,
        timeout: timedelta = UNSET,
        result: list[torch.Tensor] | None = None,
    ) -> dist.Work:
        """Fill `outputs[r]` with what rank r has in `inputs[rank]`."""
        limit = self._limit(timeout)

        def run() -> None:
            flats = [_flat(output) for output in outputs]
            self.engine.all_to_all(flats, [_flat(piece) for piece in inputs], limit)
            for output, flat in zip(outputs, flats, strict=True):
                _restore(output, flat)

        return self._go("all_to_all", run, list(outputs) if result is None else result, blocking)

    def abort(self, reason: str) -> None:
        """Make every collective of the group raise, here and on the other ranks."""
        self.engine.break_(CommunicationError(reason, (self.engine.rank,)))

    def close(self) -> None:
        """Leave the group. What is under way or queued raises."""
        if self._is_open:
            self._is_open = False
            reason = CommunicationError(
                f"rank {self.engine.rank}: the process group was destroyed before the collective had finished. "
                "Wait for every work before destroying the group."
            )
            self.engine.leave(reason)
            self.lane.close(reason)
            self.engine.close()

    def _limit(self, timeout: timedelta) -> timedelta:
        return self.timeout if timeout <= timedelta(0) else timeout

    def _go(
        self, name: str, run: Callable[[], None], result: list[torch.Tensor], blocking: bool
    ) -> dist.Work:
        if blocking:
            return self.lane.run(name, run, result)
        return self.lane.start(name, run, result)


def parts(whole: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The equal successive parts of a flat tensor."""
    numel = whole.numel() // num_parts
    return [whole[index * numel : (index + 1) * numel] for index in range(num_parts)]
