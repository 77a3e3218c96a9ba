"""The c10d backend "simccl": collectives on the device "sim" by NCCL's rules, with peers that do what this rank does.

    launch          a stream of the collective's own comes after the caller's current one; the host goes on
    wait()          the caller's current stream comes after the collective; the host goes on
    wait(timeout)   the host waits: a sync
    get_future()    complete at launch; futures.py says what it orders
    memory          inputs and outputs are kept until `wait`, or given to the allocator with the collective's stream

A stream per collective is stricter than NCCL, which has one per communicator: there, waiting for a later collective
orders the earlier ones too, and code that needs it works by luck.
One process is enough for the order of things. Sums are `world` times this rank's, and what is gathered is this rank's,
`world` times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .clocks import joined
from .memory import block_of, is_sim, ledger, on_cpu, tensors_in, use_of
from .streams import Stream, arrive, current_stream


class SimWork:
    """A collective under way."""

    def __init__(self, stream: Stream, outputs: Sequence[torch.Tensor]) -> None:
        self.clock = dict(stream.lane.clock)
        self._outputs = list(outputs)
        self._asked = False
        self._stream = stream

    def wait(self, timeout: Any = None) -> bool:
        with ledger.lock:
            joined(current_stream().lane.clock, self.clock)
        if timeout is not None:
            ledger.note_sync("work.wait(timeout)", self.clock)
            arrive()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """As an event: not yet when asked for the first time."""
        over, self._asked = self._asked, True
        if over:
            with ledger.lock:
                ledger.host_waited(self.clock)
            arrive()
        return over

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("sim", 0)])
        with self._stream:  # complete when the collective is: what it notes is the collective's stream
            future.set_result(self._outputs)
        return future


class SimGroup(dist.ProcessGroup):
    """A process group of `world` ranks of which only this one is there."""

    options = SimpleNamespace(_timeout=timedelta(seconds=60))

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._store, self._rank, self._world = store, rank, world

    def getBackendName(self) -> str:
        return "simccl"

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("sim")]

    def _get_backend(self, device: torch.device) -> SimGroup:
        if device.type != "sim":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _launch(self, name: str, outputs: Any, inputs: Any, compute: Callable[[], Any]) -> SimWork:
        writes, reads = list(tensors_in(outputs)), list(tensors_in(inputs))
        for tensor in (*writes, *reads):
            if not is_sim(tensor):
                raise RuntimeError(f"simccl: {name} of a tensor on {tensor.device}; this group serves the device sim only")
            if not tensor.is_contiguous():
                raise RuntimeError(f"simccl: {name}: Tensors must be contiguous")
        stream = Stream(name="a collective's stream")
        for tensor in (*writes, *reads):
            block_of(tensor).recorded.add(stream.lane.number)
        with ledger.lock:
            joined(stream.lane.clock, current_stream().lane.clock)
            ledger.launch(stream.lane, map(use_of, reads), map(use_of, writes), name)
        compute()
        return SimWork(stream, writes)

    def _sum(self, target: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        on_cpu(target).copy_(on_cpu(source))
        if op == dist.ReduceOp.SUM:
            on_cpu(target).mul_(self._world)

    def allreduce(self, tensors: Any, opts: Any = None) -> SimWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM) if opts is not None else dist.ReduceOp.SUM
        return self._launch("all_reduce", tensors, tensors, lambda: [self._sum(t, t, op) for t in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> SimWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> SimWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = getattr(opts, "rootRank", 0)

        def receive() -> None:
            for tensor in tensors:
                # What the receiver had there may be anything; what comes must do as weights and as variances. Bytes
                # stand for floats, and these for 0.046 in every width. Other integers are what all ranks have anyway.
                if root != self._rank and tensor.dtype is torch.uint8:
                    on_cpu(tensor).fill_(0x3D)
                elif root != self._rank and tensor.is_floating_point():
                    on_cpu(tensor).fill_(0.046)

        return self._launch("broadcast", tensors, tensors, receive)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimWork:
        def gather() -> None:
            own = on_cpu(input).reshape(-1).clone()
            on_cpu(output).view(-1).copy_(own.repeat(self._world))

        return self._launch("all_gather", output, input, gather)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        def gather() -> None:
            for output in outputs[0]:
                on_cpu(output).copy_(on_cpu(inputs[0]))

        return self._launch("all_gather", outputs, inputs, gather)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimWork:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        own = input.view(-1).view(self._world, -1)[self._rank].view(output.shape)
        return self._launch("reduce_scatter", output, input, lambda: self._sum(output, own, op))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._launch(
            "reduce_scatter", outputs, inputs, lambda: self._sum(outputs[0], inputs[0][self._rank], op)
        )

    def barrier(self, opts: Any = None) -> SimWork:
        ledger.note_sync("barrier", current_stream().lane.clock)
        return SimWork(current_stream(), [])


def register() -> None:
    """Make the backend known to c10d."""
    dist.Backend.register_backend(
        "simccl", lambda store, rank, world, timeout: SimGroup(store, rank, world), devices=["sim"]
    )
