"""The direct path to a phalanx group: `Collectives` on its lane, without c10d in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CommunicationError, MismatchError
from ..collectives import Collectives, Work, as_real
from ..failure.agreement import Settings, agreeing_on, disagreement, encode, fingerprint
from ..failure.board import FailureBoard, board_of
from ..memory.segment import process_memory
from ..shm.transport.call import ANY_ROOT, Call, Verb
from .lane import Lane
from .process_group import PhalanxProcessGroup


def _call(
    verb: Verb, output: torch.Tensor, input: torch.Tensor | None = None, scale: float = 1.0, root: int = ANY_ROOT
) -> Call:
    inputs = () if input is None else (as_real(input),)
    call = Call(verb, [as_real(output)], inputs, scale=scale, root=root)
    # Not a view of it: for as long as somebody has the work, that would count as a holder of the caller's memory.
    call.results = [output]
    return call


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled in place before it is added up: other backends do not scale, and half-precision sums stay in range."""
    return as_real(tensor.mul_(scale) if scale != 1.0 else tensor)


def _started(work: Any) -> Work:
    started: Work = work
    return started


class ShmCollectives(Collectives):
    """Collectives of one phalanx group, on tensors of the processor.

    Tensors from `allocate` are reduced where they lie; any other tensor costs a copy each way. Tensors of other devices
    go to the group itself, which hands them to the backend that was configured for their device.
    """

    fuses_scale = True
    worthwhile_buckets = 1

    def __init__(self, group: dist.ProcessGroup, lane: Lane) -> None:
        self.group: Any = group  # c10d declares overloads that no call of ours matches
        self.rank = lane.rank
        self.world = lane.world
        self._lane = lane
        self._spans_hosts = lane.operations.spans_hosts  # asked now: a lane that is closed has no operations
        # Held, because the segment lives only as long as somebody uses it.
        self._memory = process_memory()

    @cached_property
    def board(self) -> FailureBoard:
        """As of any collectives. On one host ranks know of a failure at once, by the links; on several by the store."""
        board = board_of(self.group)
        board.is_quick |= not self._spans_hosts
        return board

    def wait(self, work: Work, where: str) -> None:
        """Return when `work` is done; nobody looks at the board meanwhile, since the links name a rank that is gone."""
        self._run(work.wait, where)

    def _run(self, wait: Callable[[], Any], where: str) -> None:
        """A wait of the lane wakes up by itself and knows the rank at fault: only where it happened is missing."""
        # Not a context manager: it would leave a frame of the standard library's in every user's traceback.
        try:
            wait()
        except CommunicationError as error:
            self.board.give_up_on(error.ranks)
            raise self._placed(error, where) from error
        except MismatchError as error:
            raise self.mismatch(error, where) from error

    def agree(self, occasion: str, settings: Settings, changed: str = "") -> None:
        """As of any collectives; by a collective, since these compare what they are asked for."""
        text = encode(occasion, settings)
        where = agreeing_on(occasion, changed)
        mine = fingerprint(text) + len(text).to_bytes(8, "big")
        said = self._exchange(mine, where)
        if len(set(said)) > 1:
            longest = max(int.from_bytes(each[-8:], "big") for each in said)
            texts = [row.rstrip() for row in self._exchange(text.ljust(longest), where)]
            raise disagreement(self.me, texts, self.ranks.numbers)

    def _exchange(self, mine: bytes, where: str) -> list[bytes]:
        """What each rank gives; as long on every rank."""
        everyone = torch.empty(self.world * len(mine), dtype=torch.uint8, device="cpu")
        self.wait(self.all_gather(everyone, torch.frombuffer(bytearray(mine), dtype=torch.uint8)), where)
        return [bytes(row.tolist()) for row in everyone.view(self.world, -1)]

    def refuse(self, error: MismatchError) -> None:
        """As of any collectives; by the links, since nobody who waits here reads the board."""
        super().refuse(error)
        self._lane.abort(f"rank {self._lane.global_rank} failed: {type(error).__name__}: {error}")

    def take_failure(self) -> BaseException | None:
        """As of any collectives: the lane knows what has failed, whoever started it."""
        return self._lane.take_failure()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor in the segment, if `device` is the processor."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._memory.allocate(numel, dtype)

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0, waits_next: bool = False) -> Work:
        """Replace `tensor` on every rank by scale × the sum over ranks."""
        if not tensor.is_cpu:
            return _started(self.group.allreduce([_scaled(tensor, scale)]))
        return self._lane.submit([_call(Verb.ALL_REDUCE, tensor, scale=scale)], waits_next=waits_next)

    def all_reduce_now(self, tensor: torch.Tensor, where: str) -> None:
        """The same, over when it returns."""
        if not tensor.is_cpu:
            super().all_reduce_now(tensor, where)
            return
        self._run_now(_call(Verb.ALL_REDUCE, tensor), where)

    def barrier(self, where: str) -> None:
        """Return when every rank has come here."""
        self._run_now(Call(Verb.BARRIER), where)

    def _run_now(self, call: Call, where: str) -> None:
        # In this thread. A work that is queued wakes the lane's, which finds it done and has only taken Python's lock.
        self._run(lambda: self._lane.submit([call], blocking=True), where)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, scale: float = 1.0) -> Work:
        """Give rank r the r-th equal slice of scale × the sum of `input`."""
        if not input.is_cpu:
            return _started(self.group.reduce_scatter_single(as_real(output), _scaled(input, scale)))
        return self._lane.submit([_call(Verb.REDUCE_SCATTER, output, input, scale)])

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Fill the r-th equal slice of `output` with rank r's `input`."""
        return self.all_gather_told(output, input)

    def all_gather_told(self, output: torch.Tensor, input: torch.Tensor, waits_next: bool = False) -> Work:
        """The same: those who meet compare what they send."""
        if not input.is_cpu:
            return _started(self.group.all_gather_single(as_real(output), as_real(input)))
        return self._lane.submit([_call(Verb.ALL_GATHER, output, input)], waits_next=waits_next)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Replace `tensor` on every rank by that of rank `source`."""
        if not tensor.is_cpu:
            return _started(self.group.broadcast([as_real(tensor)], root=source))
        return self._lane.submit([_call(Verb.BROADCAST, tensor, root=source)])


def collectives_of(group: dist.ProcessGroup) -> Collectives | None:
    """The direct path to `group` if it is a phalanx group, else None."""
    return ShmCollectives(group, group.lane) if isinstance(group, PhalanxProcessGroup) else None
