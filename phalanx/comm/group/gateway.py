"""Where torch's tensors enter: any shape and stride in, flat tensors to the engine, in lane order.

A `Gateway` is one group's engine and lane with everything a caller may hand over made fit for them.
It is shared by the c10d backend and by the direct path of the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CommunicationError
from ..shm.ops.operations import Operations
from ..shm.transport.signature import ReduceOp
from .lane import Lane

UNSET = timedelta(milliseconds=-1)  # c10d's sign for "the group's own time limit"
_NO_TIME = timedelta(0)


def _is_usable(tensor: torch.Tensor) -> bool:
    """Whether the engine can work on the tensor's own memory."""
    return tensor.is_contiguous() and not tensor.is_inference()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a flat tensor: the same memory if the engine can work on it, a copy if not.

    `data` rather than `detach`: a collective is no operation of autograd, and counts as no change
    of the tensor, as with any other backend.
    """
    data = tensor.data
    if not _is_usable(tensor):
        return data.clone(memory_format=torch.contiguous_format).view(-1)
    if data.dim() == 1 and data.numel() > 1:
        return data
    flat = data.view(-1)
    # One element or none lies in order whatever its stride, which torch does not set right.
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def _restore(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Put the elements back if `_flat` copied them."""
    if not _is_usable(tensor):
        with torch.inference_mode(tensor.is_inference()):
            tensor.data.copy_(flat.view(tensor.shape))


# One tensor in place of several stands for its equal successive parts.
Pieces = torch.Tensor | Sequence[torch.Tensor]


class Gateway:
    """The collectives of one group on tensors of any form, `blocking` or as a work to wait for.

    Several tensors in one call are one work and travel one after the other. `time_limit` is asked at
    each call, so that it may change.
    """

    def __init__(self, engine: Operations, time_limit: Callable[[], timedelta]) -> None:
        self.engine = engine  # until closed
        self.rank = engine.rank
        self.world = engine.world
        self.name = engine.name
        self.lane = Lane(f"phalanx-lane-{engine.name}")
        self._time_limit = time_limit
        self._is_open = True

    def barrier(self, blocking: bool, timeout: timedelta = UNSET) -> dist.Work:
        """Meet all ranks."""
        limit = self._limit(timeout)
        return self._go("barrier", lambda: self.engine.barrier(limit), [], blocking)

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Replace each tensor by scale × the reduction over ranks."""
        limit = self._limit(timeout)

        def run() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                self.engine.all_reduce(flat, op, scale, limit)
                _restore(tensor, flat)

        return self._go("all_reduce", run, list(tensors), blocking)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Replace `tensor` on `root` by scale × the reduction over ranks."""
        limit = self._limit(timeout)

        def run() -> None:
            flat = _flat(tensor)
            self.engine.reduce(flat, root, op, scale, limit)
            if root == self.rank:
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
            if root != self.rank:
                _restore(tensor, flat)

        return self._go("broadcast", run, [tensor], blocking)

    def all_gather(
        self,
        outputs: Sequence[Pieces],
        inputs: Sequence[torch.Tensor],
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Fill piece r of each output with rank r's input."""
        limit = self._limit(timeout)

        def run() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                flats, pieces, _ = self._pieces(output)
                self.engine.all_gather(pieces, _flat(input), limit)
                _restore_pieces(output, flats)

        return self._go("all_gather", run, _listed(outputs), blocking)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Pieces],
        op: ReduceOp,
        scale: float,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Write scale × the reduction of everybody's piece `rank` of each input to its output."""
        limit = self._limit(timeout)

        def run() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                _, pieces, whole = self._pieces(input)
                flat = _flat(output)
                self.engine.reduce_scatter(flat, pieces, whole, op, scale, limit)
                _restore(output, flat)

        return self._go("reduce_scatter", run, list(outputs), blocking)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Fill `outputs[r]` with what rank r has in `inputs[rank]`."""
        limit = self._limit(timeout)

        def run() -> None:
            flats = [_flat(output) for output in outputs]
            self.engine.all_to_all(flats, [_flat(piece) for piece in inputs], limit)
            _restore_pieces(outputs, flats)

        return self._go("all_to_all", run, list(outputs), blocking)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        root: int,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Fill `outputs[r]` with rank r's `input` on `root`; the others have no outputs."""
        nothing = input.new_empty(0)
        everybody = range(self.world)
        given = [input if rank == root else nothing for rank in everybody]
        return self.all_to_all(outputs or [nothing for _ in everybody], given, blocking, timeout)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        blocking: bool,
        timeout: timedelta = UNSET,
    ) -> dist.Work:
        """Fill `output` with what `root` has in `inputs[rank]`; the others have no inputs."""
        nothing = output.new_empty(0)
        everybody = range(self.world)
        taken = [output if rank == root else nothing for rank in everybody]
        return self.all_to_all(taken, inputs or [nothing for _ in everybody], blocking, timeout)

    def abort(self, reason: str) -> None:
        """Make every collective of the group raise, here and on the other ranks."""
        if self._is_open:
            self.engine.break_(CommunicationError(reason, (self.name,)))

    def close(self) -> None:
        """Leave the group. What is under way or queued raises."""
        if self._is_open:
            self._is_open = False
            reason = CommunicationError(
                f"rank {self.name}: the process group was destroyed before the collective had "
                "finished. Wait for every work before destroying the group.",
                (self.name,),
            )
            self.engine.leave(reason)
            self.lane.close(reason)
            self.engine.close()
            # Whoever still holds the group, and many do, is not to hold its memory.
            del self.engine

    def abandon(self) -> None:
        """Give up the group in a forked child, without a word to the other ranks."""
        if not self._is_open:
            return
        self._is_open = False
        reason = CommunicationError(
            f"a process group of rank {self.name} was used in a forked child. "
            "Make process groups in the child itself, or start it with spawn."
        )
        self.lane.abandon(reason)
        self.engine.abandon()

    def _limit(self, timeout: timedelta) -> timedelta:
        return self._time_limit() if timeout <= _NO_TIME else timeout

    def _pieces(self, given: Pieces) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Flat tensors, the pieces they make up, and the tensor of which those are the parts, if one."""
        if isinstance(given, torch.Tensor):
            whole = _flat(given)
            return [whole], parts(whole, self.world), whole
        flats = [_flat(piece) for piece in given]
        return flats, flats, None

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


def _restore_pieces(given: Pieces, flats: Sequence[torch.Tensor]) -> None:
    for tensor, flat in zip([given] if isinstance(given, torch.Tensor) else given, flats, strict=True):
        _restore(tensor, flat)


def _listed(given: Sequence[Pieces]) -> list[torch.Tensor]:
    return [t for pieces in given for t in ([pieces] if isinstance(pieces, torch.Tensor) else pieces)]
