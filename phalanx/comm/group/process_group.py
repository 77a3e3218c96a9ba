"""The c10d backend "phalanx": a process group whose collectives go through shared memory.

Importing this module registers it, after which `init_process_group("phalanx")`, `new_group` and
everything of torch that takes a group work on it. What is not accelerated goes, call by call, to an
inner gloo group; tensors of other devices go to the backend configured for them
(`"cpu:phalanx,cuda:nccl"`), or to gloo as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..collectives import Collectives
from ..shm.ops.call import Call, gather_call, parts, scatter_call
from ..shm.transport.signature import DTYPES, ReduceOp, Verb
from .connect import connect
from .devices import DeviceBackends
from .direct import ShmCollectives
from .lane import Lane
from .lifetime import close_at_exit

# mypy: disable-error-code="override,assignment,no-any-return"
# c10d declares most methods as several overloads, which no single Python signature matches, and the
# backends handed on to have no types.

# Options of c10d, whose classes are private to torch's C extension. Each has `asyncOp` and `timeout`,
# most have one or two fields more, named as c10d names them.
_Options = Any

_Kind: Any = dist.ReduceOp.RedOpType
# By number: c10d's own kinds are slow to hash and to compare.
_REDUCE_OPS = {
    int(_Kind.SUM): ReduceOp.SUM,
    int(_Kind.AVG): ReduceOp.SUM,  # with a scale
    int(_Kind.PRODUCT): ReduceOp.PRODUCT,
    int(_Kind.MIN): ReduceOp.MIN,
    int(_Kind.MAX): ReduceOp.MAX,
    int(_Kind.BAND): ReduceOp.BAND,
    int(_Kind.BOR): ReduceOp.BOR,
    int(_Kind.BXOR): ReduceOp.BXOR,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_AVERAGE = int(_Kind.AVG)
_REDUCED_DTYPES = frozenset(DTYPES)
# One tensor in place of several stands for its equal successive parts.
_Pieces = torch.Tensor | Sequence[torch.Tensor]


def _movable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the shared memory path can carry these tensors."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
    return True


class PhalanxProcessGroup(dist.ProcessGroup):
    """A c10d process group through shared memory.

    The methods have the names and signatures under which c10d calls them, from Python and from C++.
    A call which the shared memory path cannot take goes to the backend of the tensor's device.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, global_ranks: Sequence[int], timeout: timedelta
    ) -> None:
        # The constructor with a store cannot be used by a subclass; see `get_group_store`.
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._store = store
        self._others = DeviceBackends(self, store, rank, world, timeout)
        operations = connect(dist.PrefixStore("phalanx", store), rank, world, global_ranks, timeout)
        others = self._others  # not `self`, which the finalizer below is to outlive
        self.lane = Lane(operations, lambda: others.timeout)
        # The group may be dropped without having been destroyed.
        close_at_exit(self.lane)
        self._finalizer = weakref.finalize(self, self.lane.close)

    # ---- what c10d asks about

    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return "phalanx"

    def get_group_store(self) -> dist.Store:
        """The store given to the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of all collectives to come."""
        self._others.set_timeout(timeout)

    def abort(self) -> None:
        """Make every collective under way or to come raise, here and on the other ranks."""
        self.lane.abort(f"rank {self.lane.global_rank} aborted the process group.")
        self._others.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        self._finalizer()
        self._others.shutdown()

    # ---- collectives that compute

    def allreduce(self, tensors: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Reduce a tensor over all ranks, on all ranks."""
        tensors, opts = _one(tensors), _options(AllreduceOptions, opts, keywords)
        how = self._reduce_op(tensors, opts)
        if how is None or len(tensors) != 1:
            return self._others.of(tensors).allreduce(tensors, opts)
        return self._submit([Call(Verb.ALL_REDUCE, tensors, (), *how)], opts)

    def allreduce_coalesced(self, tensors: Any, opts: _Options = None) -> dist.Work:
        """Reduce several tensors over all ranks, on all ranks."""
        opts = _options(AllreduceCoalescedOptions, opts, {})
        how = self._reduce_op(tensors, opts)
        if how is None:
            return self._others.of(tensors).allreduce_coalesced(tensors, opts)
        return self._submit([Call(Verb.ALL_REDUCE, [tensor], (), *how) for tensor in tensors], opts)

    def reduce(self, tensors: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Reduce a tensor over all ranks, on one."""
        tensors, opts = _one(tensors), _options(ReduceOptions, opts, keywords)
        how = self._reduce_op(tensors, opts)
        if how is None or len(tensors) != 1:
            return self._others.of(tensors).reduce(tensors, opts)
        return self._submit([Call(Verb.REDUCE, tensors, (), *how, opts.rootRank)], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Reduce a list of tensors, giving each rank one of them."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(ReduceScatterOptions, opts, keywords)
        fits = len(outputs) == 1 and self._fits(outputs[0], inputs[0])
        how = self._reduce_op([*outputs, *inputs[0]], opts) if fits else None
        if how is None:
            return self._others.of(outputs).reduce_scatter(outputs, inputs, opts)
        return self._submit([Call(Verb.REDUCE_SCATTER, outputs, inputs[0], *how)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: _Options = None
    ) -> dist.Work:
        """Reduce a tensor, giving each rank an equal part of it."""
        opts = _options(ReduceScatterOptions, opts, {})
        how = self._reduce_op((output, input), opts) if self._fits(output, input) else None
        if how is None:
            return self._others.of((output,))._reduce_scatter_base(output, input, opts)
        return self._submit([Call(Verb.REDUCE_SCATTER, [output], [input], *how)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: _Options = None
    ) -> dist.Work:
        """`reduce_scatter_single` of several tensors, as one work."""
        opts = _options(ReduceScatterOptions, opts, {})
        how = self._reduce_op([*outputs, *inputs], opts) if self._fit(outputs, inputs) else None
        if how is None:
            return self._others.of(outputs).reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([Call(Verb.REDUCE_SCATTER, [output], [input], *how) for output, input in pairs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- collectives that move

    def broadcast(self, tensors: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Give all ranks the tensor of one."""
        tensors, opts = _one(tensors), _options(BroadcastOptions, opts, keywords)
        if len(tensors) != 1 or not _movable(tensors):
            return self._others.of(tensors).broadcast(tensors, opts)
        return self._submit([Call(Verb.BROADCAST, tensors, root=opts.rootRank)], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Give all ranks the tensors of all, as a list."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(AllgatherOptions, opts, keywords)
        fits = len(inputs) == 1 and self._fits(inputs[0], outputs[0])
        if not fits or not _movable([*outputs[0], *inputs]):
            return self._others.of(inputs).allgather(outputs, inputs, opts)
        return self._submit([Call(Verb.ALL_GATHER, outputs[0], inputs)], opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: _Options = None
    ) -> dist.Work:
        """Give all ranks the tensors of all, one after the other in one tensor."""
        opts = _options(AllgatherOptions, opts, {})
        if not self._fits(input, output) or not _movable((output, input)):
            return self._others.of((input,))._allgather_base(output, input, opts)
        return self._submit([Call(Verb.ALL_GATHER, [output], [input])], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: _Options = None
    ) -> dist.Work:
        """`all_gather_single` of several tensors, as one work."""
        opts = _options(AllgatherOptions, opts, {})
        if not self._fit(inputs, outputs) or not _movable([*outputs, *inputs]):
            return self._others.of(inputs).allgather_into_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([Call(Verb.ALL_GATHER, [output], [input]) for output, input in pairs], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: _Options = None
    ) -> dist.Work:
        """`allgather` of several tensors, as one work; `outputs[r]` holds those of rank r."""
        opts = _options(AllgatherOptions, opts, {})
        by_tensor = list(zip(*outputs, strict=True))
        if not self._fit(inputs, by_tensor) or not _movable([t for row in outputs for t in row]):
            return self._others.of(inputs).allgather_coalesced(outputs, inputs, opts)
        pairs = zip(by_tensor, inputs, strict=True)
        return self._submit([Call(Verb.ALL_GATHER, row, [input]) for row, input in pairs], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: _Options = None,
        **keywords: Any,
    ) -> dist.Work:
        """Exchange parts of a tensor: equal ones, or as many rows as the sizes say."""
        opts = _options(AllToAllOptions, opts, keywords)
        given, taken = self._split(input, input_sizes), self._split(output, output_sizes)
        if given is None or taken is None or not _movable((output, input)):
            return self._others.of((input,)).alltoall_base(output, input, output_sizes, input_sizes, opts)
        return self._submit([Call(Verb.ALL_TO_ALL, taken, given)], opts)

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: _Options = None
    ) -> dist.Work:
        """Exchange lists of tensors."""
        opts = _options(AllToAllOptions, opts, {})
        if not _movable([*outputs, *inputs]):
            return self._others.of(inputs).alltoall(outputs, inputs, opts)
        return self._submit([Call(Verb.ALL_TO_ALL, outputs, inputs)], opts)

    def barrier(self, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Meet all ranks."""
        opts = _options(BarrierOptions, opts, keywords)
        if opts.device is not None and self._others.has(opts.device):
            return self._others.of_device(opts.device).barrier(opts)
        return self._submit([Call(Verb.BARRIER)], opts)

    def gather(self, outputs: Any, inputs: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Give one rank the tensors of all."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _options(GatherOptions, opts, keywords)
        taken = outputs[0] if outputs else []
        is_whole = bool(taken) == (opts.rootRank == self.rank()) and len(taken) in (0, self.size())
        if len(inputs) != 1 or not is_whole or not _movable([*inputs, *taken]):
            return self._others.of(inputs).gather(outputs, inputs, opts)
        return self._submit([gather_call(taken, inputs[0], opts.rootRank, self.size())], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: _Options = None, **keywords: Any) -> dist.Work:
        """Give each rank one of a rank's tensors."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _options(ScatterOptions, opts, keywords)
        given = inputs[0] if inputs else []
        is_whole = bool(given) == (opts.rootRank == self.rank()) and len(given) in (0, self.size())
        if len(outputs) != 1 or not is_whole or not _movable([*outputs, *given]):
            return self._others.of(outputs).scatter(outputs, inputs, opts)
        return self._submit([scatter_call(outputs[0], given, opts.rootRank, self.size())], opts)

    # ---- what stays with gloo, or whichever backend the tensor's device has

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Send a tensor to one rank."""
        return self._others.of(tensors).send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Receive a tensor from one rank."""
        return self._others.of(tensors).recv(tensors, rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receive a tensor from whichever rank sends one."""
        return self._others.of(tensors).recv_anysource(tensors, tag)

    # ---- parts

    def _submit(self, calls: Sequence[Call], opts: _Options) -> dist.Work:
        return self.lane.submit(calls, not opts.asyncOp, opts.timeout)

    def _reduce_op(self, tensors: Sequence[torch.Tensor], opts: _Options) -> tuple[ReduceOp, float] | None:
        """The operation and the scale that are asked for; None if shared memory cannot do that to these tensors."""
        kind = int(opts.reduceOp.op)
        op = _REDUCE_OPS.get(kind)
        if op is None or not tensors:
            return None
        dtype = tensors[0].dtype
        if dtype not in _REDUCED_DTYPES or (dtype.is_floating_point and op in _BITWISE):
            return None
        if not _movable(tensors) or any(t.dtype is not dtype for t in tensors[1:]):
            return None
        return op, 1.0 / self.lane.world if kind == _AVERAGE else 1.0

    def _fits(self, one: torch.Tensor, whole: _Pieces) -> bool:
        """Whether `one` has the size and type of this rank's piece of `whole`.

        If not, the call goes to gloo, which says what is wrong in words that users know.
        """
        if isinstance(whole, torch.Tensor):
            return one.numel() * self.lane.world == whole.numel() and one.dtype is whole.dtype
        own = whole[self.rank()] if len(whole) == self.size() else None
        return own is not None and one.numel() == own.numel() and len({t.dtype for t in (one, *whole)}) == 1

    def _fit(self, ones: Sequence[torch.Tensor], alls: Sequence[_Pieces]) -> bool:
        return 0 < len(ones) == len(alls) and all(map(self._fits, ones, alls))

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """The parts of a tensor that are to be exchanged, if it has such parts."""
        if not tensor.is_contiguous() or tensor.dim() == 0:
            return None
        if not sizes:
            return parts(tensor.view(-1), self.size()) if tensor.shape[0] % self.size() == 0 else None
        if len(sizes) != self.size() or sum(sizes) != tensor.shape[0]:
            return None
        return list(tensor.split(list(sizes)))


def collectives_of(group: dist.ProcessGroup) -> Collectives | None:
    """The direct path to `group` if it is a phalanx group, else None."""
    return ShmCollectives(group, group.lane) if isinstance(group, PhalanxProcessGroup) else None


def _one(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(kind: Any, given: Any, keywords: dict[str, Any]) -> _Options:
    """c10d's options from what its overloads accept: options, or the operation or the root by itself."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    for name, value in keywords.items():
        if value is not None:
            setattr(options, {"op": "reduceOp", "root": "rootRank"}.get(name, name), value)
    return options


def _create(options: Any, _: Any) -> PhalanxProcessGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return PhalanxProcessGroup(options.store, options.group_rank, options.group_size, ranks, options.timeout)


def register() -> None:
    """Make the backend known to c10d, once."""
    if not hasattr(dist.Backend, "PHALANX"):
        dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])


register()
