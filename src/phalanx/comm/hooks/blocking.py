"""A process group whose collectives are over when they return, whatever the caller asked for.

What is chained to their futures runs at once, in the caller's thread: a hook that launches its second
collective from a callback of the first thereby becomes a plain sequence of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class FinishedWork:
    """A collective that is over."""

    def __init__(self, value: list[torch.Tensor]) -> None:
        self._value = value

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        devices = {tensor.device for tensor in self._value if tensor.device.type != "cpu"}
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=list(devices))
        future.set_result(self._value)
        return future


class BlockingGroup(dist.ProcessGroup):
    """The ranks of `group`, with the collectives that hooks of torch use."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the stub lacks this form
        self._group = group

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        tensors = tensors if isinstance(tensors, Sequence) else [tensors]
        self._group.allreduce(tensors, *options).wait()
        return FinishedWork(list(tensors))

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        self._group.broadcast(tensors, *options).wait()
        return FinishedWork(list(tensors))

    def allgather(self, output_tensors: Any, input_tensors: Any, *options: Any) -> Any:
        self._group.allgather(output_tensors, input_tensors, *options).wait()
        # Stacked by rank, as NCCL's future has it; gloo's has a list of one tensor per rank. Torch's hooks
        # index the one and would fail on the other.
        return FinishedWork([torch.stack(output_tensors[0])])
