"""The c10d backend "phalanx": a process group whose collectives go through shared memory.

Importing this module registers it, after which `init_process_group("phalanx")`, `new_group` and
everything of torch that takes a group work on it. What is not accelerated goes, call by call, to an
inner gloo group; tensors of other devices go to the backend configured for them
(`"cpu:phalanx,cuda:nccl"`), or to gloo as well.
"""

from __future__ import annotations

import weakref
from collections import deque
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

from ...observe.live.pulse import pulse
from ..memory.left_over import drop_left_over
from ..shm.transport.call import Call, Verb, gather_call, scatter_call
from ..untraced import all_untraced
from .arguments import Options, all_fit, fits, listed, movable, options_of, reduce_op, split
from .connect import connect
from .devices import DeviceBackends
from .lane import Lane
from .lifetime import close_at_exit
from .making import watched
from .members import agree_on_members, forget_members

_SMALL_BYTES = 1024
_MOST_RECENT = 32
_REDUCES = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)

# mypy: disable-error-code="override,assignment,no-any-return"
# c10d declares most methods as several overloads, which no single Python signature matches, and the
# backends handed on to have no types.


@all_untraced
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
        watched(lambda: self._connect(rank, global_ranks, timeout), store, global_ranks[rank], global_ranks, timeout)
        # Works that Python drops while C++ holds them, as torch's wrapper does in join(): with its Python half gone, a work
        # is c10d's base class, whose `wait` never ends. Only small ones, which hold next to nothing: of the two functions of
        # torch that take a work, `_set_forward_pass_work_handle` is given one number, and `_register_work` holds Python's
        # half too (tests/comm/group/test_torch_classes.py would notice if it did not).
        self._recent: deque[dist.Work] = deque(maxlen=_MOST_RECENT)
        pulse.reductions = pulse.reductions or 0
        # The group may be dropped without having been destroyed.
        close_at_exit(self.lane)
        self._finalizer = weakref.finalize(self, self.lane.close)

    def _connect(self, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> None:
        store, me = self._store, global_ranks[rank]
        # First of all: gloo, below, would wait for ranks that are in no such group.
        agree_on_members(store, me, global_ranks, timeout)
        others = self._others = DeviceBackends(self, store, rank, len(global_ranks), timeout)
        operations = connect(dist.PrefixStore("phalanx", store), rank, global_ranks, timeout)
        forget_members(store, me)
        # Not of `self`, which the finalizer of the group is to outlive.
        self.lane = Lane(operations, lambda: others.timeout)

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
        drop_left_over()
        self._finalizer()
        self._others.shutdown()

    # ---- collectives that compute

    def allreduce(self, tensors: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Reduce a tensor over all ranks, on all ranks."""
        tensors, opts = listed(tensors), options_of(AllreduceOptions, opts, keywords)
        how = reduce_op(tensors, opts, self.lane.world)
        if how is None or len(tensors) != 1:
            return self._others.of(tensors).allreduce(tensors, opts)
        return self._submit([Call(Verb.ALL_REDUCE, tensors, (), *how)], opts)

    def allreduce_coalesced(self, tensors: Any, opts: Options = None) -> dist.Work:
        """Reduce several tensors over all ranks, on all ranks."""
        opts = options_of(AllreduceCoalescedOptions, opts, {})
        how = reduce_op(tensors, opts, self.lane.world)
        if how is None:
            return self._others.of(tensors).allreduce_coalesced(tensors, opts)
        return self._submit([Call(Verb.ALL_REDUCE, [tensor], (), *how) for tensor in tensors], opts)

    def reduce(self, tensors: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Reduce a tensor over all ranks, on one."""
        tensors, opts = listed(tensors), options_of(ReduceOptions, opts, keywords)
        how = reduce_op(tensors, opts, self.lane.world)
        if how is None or len(tensors) != 1:
            return self._others.of(tensors).reduce(tensors, opts)
        return self._submit([Call(Verb.REDUCE, tensors, (), *how, opts.rootRank)], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Reduce a list of tensors, giving each rank one of them."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(ReduceScatterOptions, opts, keywords)
        is_one = len(outputs) == 1 and fits(outputs[0], inputs[0], self.lane)
        how = reduce_op([*outputs, *inputs[0]], opts, self.lane.world) if is_one else None
        if how is None:
            return self._others.of(outputs).reduce_scatter(outputs, inputs, opts)
        return self._submit([Call(Verb.REDUCE_SCATTER, outputs, inputs[0], *how)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Options = None
    ) -> dist.Work:
        """Reduce a tensor, giving each rank an equal part of it."""
        opts = options_of(ReduceScatterOptions, opts, {})
        how = reduce_op((output, input), opts, self.lane.world) if fits(output, input, self.lane) else None
        if how is None:
            return self._others.of((output,))._reduce_scatter_base(output, input, opts)
        return self._submit([Call(Verb.REDUCE_SCATTER, [output], [input], *how)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """`reduce_scatter_single` of several tensors, as one work."""
        opts = options_of(ReduceScatterOptions, opts, {})
        how = reduce_op([*outputs, *inputs], opts, self.lane.world) if all_fit(outputs, inputs, self.lane) else None
        if how is None:
            return self._others.of(outputs).reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([Call(Verb.REDUCE_SCATTER, [output], [input], *how) for output, input in pairs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- collectives that move

    def broadcast(self, tensors: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Give all ranks the tensor of one."""
        tensors, opts = listed(tensors), options_of(BroadcastOptions, opts, keywords)
        if len(tensors) != 1 or not movable(tensors):
            return self._others.of(tensors).broadcast(tensors, opts)
        return self._submit([Call(Verb.BROADCAST, tensors, root=opts.rootRank)], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Give all ranks the tensors of all, as a list."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(AllgatherOptions, opts, keywords)
        is_one = len(inputs) == 1 and fits(inputs[0], outputs[0], self.lane)
        if not is_one or not movable([*outputs[0], *inputs]):
            return self._others.of(inputs).allgather(outputs, inputs, opts)
        return self._submit([Call(Verb.ALL_GATHER, outputs[0], inputs)], opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Options = None
    ) -> dist.Work:
        """Give all ranks the tensors of all, one after the other in one tensor."""
        opts = options_of(AllgatherOptions, opts, {})
        if not fits(input, output, self.lane) or not movable((output, input)):
            return self._others.of((input,))._allgather_base(output, input, opts)
        return self._submit([Call(Verb.ALL_GATHER, [output], [input])], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """`all_gather_single` of several tensors, as one work."""
        opts = options_of(AllgatherOptions, opts, {})
        if not all_fit(inputs, outputs, self.lane) or not movable([*outputs, *inputs]):
            return self._others.of(inputs).allgather_into_tensor_coalesced(outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._submit([Call(Verb.ALL_GATHER, [output], [input]) for output, input in pairs], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """`allgather` of several tensors, as one work; `outputs[r]` holds those of rank r."""
        opts = options_of(AllgatherOptions, opts, {})
        by_tensor = list(zip(*outputs, strict=True))
        if not all_fit(inputs, by_tensor, self.lane) or not movable([t for row in outputs for t in row]):
            return self._others.of(inputs).allgather_coalesced(outputs, inputs, opts)
        pairs = zip(by_tensor, inputs, strict=True)
        return self._submit([Call(Verb.ALL_GATHER, row, [input]) for row, input in pairs], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options = None,
        **keywords: Any,
    ) -> dist.Work:
        """Exchange parts of a tensor: equal ones, or as many rows as the sizes say."""
        opts = options_of(AllToAllOptions, opts, keywords)
        given, taken = split(input, input_sizes, self.size()), split(output, output_sizes, self.size())
        if given is None or taken is None or not movable((output, input)):
            return self._others.of((input,)).alltoall_base(output, input, output_sizes, input_sizes, opts)
        call = Call(Verb.ALL_TO_ALL, taken, given)
        call.results = [output]
        return self._submit([call], opts)

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """Exchange lists of tensors."""
        opts = options_of(AllToAllOptions, opts, {})
        if not movable([*outputs, *inputs]):
            return self._others.of(inputs).alltoall(outputs, inputs, opts)
        return self._submit([Call(Verb.ALL_TO_ALL, outputs, inputs)], opts)

    def barrier(self, opts: Options = None, **keywords: Any) -> dist.Work:
        """Meet all ranks."""
        opts = options_of(BarrierOptions, opts, keywords)
        if opts.device is not None and self._others.has(opts.device):
            return self._others.of_device(opts.device).barrier(opts)
        return self._submit([Call(Verb.BARRIER)], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Give one rank the tensors of all."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = options_of(GatherOptions, opts, keywords)
        taken = outputs[0] if outputs else []
        is_whole = bool(taken) == (opts.rootRank == self.rank()) and len(taken) in (0, self.size())
        if len(inputs) != 1 or not is_whole or not movable([*inputs, *taken]):
            return self._others.of(inputs).gather(outputs, inputs, opts)
        return self._submit([gather_call(taken, inputs[0], opts.rootRank, self.size())], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Options = None, **keywords: Any) -> dist.Work:
        """Give each rank one of a rank's tensors."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = options_of(ScatterOptions, opts, keywords)
        given = inputs[0] if inputs else []
        is_whole = bool(given) == (opts.rootRank == self.rank()) and len(given) in (0, self.size())
        if len(outputs) != 1 or not is_whole or not movable([*outputs, *given]):
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

    def _submit(self, calls: Sequence[Call], opts: Options) -> dist.Work:
        if calls and calls[0].verb in _REDUCES:
            pulse.reductions = (pulse.reductions or 0) + 1
        work = self.lane.submit(calls, not opts.asyncOp, opts.timeout)
        if opts.asyncOp and sum(tensor.nbytes for call in calls for tensor in call.outputs) <= _SMALL_BYTES:
            self._recent.append(work)
        return work


def create(options: Any, _: Any) -> PhalanxProcessGroup:
    """A group as c10d asks for one."""
    ranks = options.global_ranks_in_group or range(options.group_size)
    return PhalanxProcessGroup(options.store, options.group_rank, options.group_size, ranks, options.timeout)


def register() -> None:
    """Make the backend known to c10d, once."""
    if not hasattr(dist.Backend, "PHALANX"):
        dist.Backend.register_backend("phalanx", create, extended_api=True, devices=["cpu"])


register()
