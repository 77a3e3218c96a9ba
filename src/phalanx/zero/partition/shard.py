"""A shard: the slice of one bucket that this rank owns, the tensors its local optimizer steps, the way back to all.

    stage      param memory                         slices' `.grad`
    idle       equal on all ranks                   none (or the mean, where the reducer scatters)
    taken      equal on all ranks                   their part of the averaged gradients
    stepped    own shard new, the others old        as before
    gathering  own shard new, the others in flight  free
    idle       equal on all ranks, new              free

Owns the slices, each of one parameter. Must not know of the optimizer, nor when a step happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...comm.collectives import Collectives, Work
from ...errors import MismatchError, ReductionError
from ...observe import trace
from ...plan import Bucket, ParamSpec
from ...plan.shards import ParamSlice, shard_numel, slices_of
from .storage import ParameterStorage, flatten

# Elements of one slice on a CPU. Optimizers pass over a tensor a dozen times; a slice of this size, with its
# gradient and state, stays in the cache in between, which makes a step of Adam two to three times faster than on the
# whole; smaller ones cost more calls, larger ones fall out of the cache (docs/design/zero.md has the numbers).
CPU_SLICE_NUMEL = 196608
_NUM_BUFFERS = 2


# Makes the memory of a bucket in which parameters are to live.
Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class SparseGradient(ReductionError):
    """A gradient that cannot be cut. Nothing has been changed yet."""


class LiveSlice:
    """A slice of one parameter and the tensor that stands for it in the local optimizer."""

    __slots__ = ("_inside", "bounds", "index", "storage", "tensor")

    def __init__(self, bounds: ParamSlice, index: int, storage: ParameterStorage) -> None:
        """`index` is the parameter's number in the optimizer."""
        self.bounds = bounds
        self.index = index
        self.storage = storage
        # An edge has memory of its own: the elements beside the owned ones belong to another rank.
        data = torch.zeros(self.length, dtype=storage.flat.dtype, device=storage.flat.device)
        self.tensor = torch.nn.Parameter(data if bounds.is_edge else self._in_place(), requires_grad=False)
        self._inside = self.tensor.detach()[self._owned] if bounds.is_edge else None

    @property
    def length(self) -> int:
        """Elements computed."""
        return self.bounds.end - self.bounds.begin

    @property
    def _owned(self) -> slice:
        return slice(self.bounds.start - self.bounds.begin, self.bounds.stop - self.bounds.begin)

    def _in_place(self) -> torch.Tensor:
        return self.shaped(self.storage.flat[self.bounds.begin : self.bounds.end])

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """Values for this slice in its tensor's shape: flat, but without dimensions for a scalar parameter."""
        return values if self.storage.spec.shape else values.view(())

    def owned(self, values: torch.Tensor) -> torch.Tensor:
        """The owned part of a tensor in the shape of this slice, flat."""
        return values.view(-1)[self._owned]

    def rebind(self) -> None:
        """The parameter has other memory now."""
        if not self.bounds.is_edge:
            self.tensor.data = self._in_place()

    def load(self) -> None:
        """Before a step: an edge gets the parameter's values."""
        if self._inside is not None:
            self._inside.copy_(self.storage.flat[self.bounds.start : self.bounds.stop])

    def store(self) -> None:
        """After a step: an edge gives its owned part back."""
        if self._inside is not None:
            self.storage.flat[self.bounds.start : self.bounds.stop].copy_(self._inside)


class Shard:
    """One bucket of the element partition, seen from one rank."""

    def __init__(
        self,
        bucket: Bucket,
        specs: Sequence[ParamSpec],
        params: Sequence[torch.Tensor],
        numbers: Sequence[int],
        collectives: Collectives,
        allocate: Allocate | None,
        is_shared: bool = False,
    ) -> None:
        """`specs`, `params` and `numbers` (the parameters' numbers in the optimizer) are those of the plan.

        With `allocate`, parameters move into the memory that it makes; `is_shared` says that this is the same memory
        on all ranks.
        """
        self.bucket = bucket
        self.index = bucket.index
        self.params = [params[slot.param] for slot in bucket.slots]
        self.device = self.params[0].device
        self.shard_numel = shard_numel(bucket.numel, collectives.world)
        self._rank = collectives.rank
        # The bucket's memory where parameters live in it, padded so that all shards have the same size. None where they live
        # in memory of their own; the buffers of `Gathering` then stand for it while a gather is under way.
        self.flat: torch.Tensor | None = None
        if allocate is not None:
            self.flat = allocate(self.shard_numel * collectives.world, bucket.dtype, self.device)
        self.is_shared = is_shared
        # Of shared parameters, when they were last written by an optimizer; None before that.
        self._versions: list[int] | None = None
        self.storages = {
            slot.param: ParameterStorage(params[slot.param], specs[slot.param], self._memory_of(slot.offset, slot.numel))
            for slot in bucket.slots
        }
        self.offset_of = {slot.param: slot.offset for slot in bucket.slots}
        max_numel = CPU_SLICE_NUMEL if self.device.type == "cpu" else None
        slices = slices_of(bucket, collectives.world, collectives.rank, max_numel)
        self.slices = [LiveSlice(one, numbers[one.param], self.storages[one.param]) for one in slices]
        self._edges = [live for live in self.slices if live.bounds.is_edge]
        self._copies = [storage for storage in self.storages.values() if storage.is_copy]
        self._remember_copies()

    def _memory_of(self, offset: int, numel: int) -> torch.Tensor | None:
        return None if self.flat is None else self.flat.narrow(0, offset, numel)

    # -- before a step -------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether this bucket takes part in a step, as far as this rank knows (`LocalOptimizer.agree_on_due`)."""
        # Not by the gradients alone: this rank may be without one that others have.
        return any(param.requires_grad or param.grad is not None for param in self.params)

    def refresh(self) -> None:
        """Look where the parameters are, and bring their values to where the slices see them."""
        if self._versions is not None:
            self._refuse_writes(self._versions)
        moved = [storage for storage in self.storages.values() if storage.refresh()]
        # `flat` is another tensor then, while the slices' tensors still look at the old memory.
        if moved:
            for live in self.slices:
                if live.storage in moved:
                    live.rebind()
            self._copies = [storage for storage in self.storages.values() if storage.is_copy]
            self._remember_copies()
        # Only owned elements. What an edge holds of other ranks' elements is stepped along and never read.
        for edge in self._edges:
            edge.load()

    def _refuse_writes(self, versions: Sequence[int]) -> None:
        for storage, version in zip(self.storages.values(), versions, strict=True):
            if storage.param._version != version or storage.has_moved:
                raise MismatchError(
                    f"{storage.spec.name} was written outside the optimizer since the last step. With "
                    "shared_parameters=True that changes it under every rank at once. Load parameters before the first "
                    "step, or make the optimizer anew."
                )

    def remember_writes(self) -> None:
        """All ranks have stepped: any write to a shared parameter from now on is somebody else's."""
        if self.is_shared:
            self._versions = [storage.param._version for storage in self.storages.values()]

    def accept_writes(self) -> None:
        """Every rank has written the same to shared parameters, and no rank steps before all have."""
        if self._versions is not None:
            self.remember_writes()

    def check_gradients(self) -> None:
        """Refuse gradients that cannot be cut, before anything is stepped."""
        for storage in self.storages.values():
            grad = storage.param.grad
            if grad is not None and grad.layout != torch.strided:
                raise SparseGradient(
                    f"{storage.spec.name} has a {grad.layout} gradient, which cannot be cut into slices. Use a layer with "
                    'dense gradients (Embedding(sparse=False)), or partition="parameter".'
                )

    def take_gradients(self) -> None:
        """Give every slice its part of its parameter's `.grad`, or none."""
        latest: ParameterStorage | None = None
        flat: torch.Tensor | None = None
        for live in self.slices:
            # Once per parameter, not per slice: a gradient with other strides than the parameter's is copied.
            if live.storage is not latest:
                latest = live.storage
                flat = _flat_gradient(latest)
            if flat is not None and flat.dtype != live.tensor.grad_dtype:
                live.tensor.grad_dtype = flat.dtype  # as the user has chosen for the parameter
            begin, end = live.bounds.begin, live.bounds.end
            live.tensor.grad = None if flat is None else live.shaped(flat[begin:end])

    def drop_gradients(self) -> None:
        for live in self.slices:
            live.tensor.grad = None

    # -- after a step --------------------------------------------------------------------------

    def store(self) -> None:
        """What was stepped beside the parameters goes back into them."""
        for edge in self._edges:
            edge.store()

    @property
    def own_shard(self) -> slice:
        return slice(self._rank * self.shard_numel, (self._rank + 1) * self.shard_numel)

    def launch_gather(self, collectives: Collectives, scratch: torch.Tensor | None) -> Work:
        """Send the own shard to all ranks; without a bucket buffer it travels through `scratch`."""
        flat = self.flat
        if flat is None:
            assert scratch is not None, "parameters in their own memory travel through scratch memory"
            # Only the own shard is packed: the gather fills in the rest.
            flat = scratch
            for offset, source in self._outgoing:
                flat[offset : offset + source.numel()].copy_(source)
        return collectives.all_gather(flat, flat[self.own_shard])

    def finish_gather(self, scratch: torch.Tensor | None) -> None:
        """The shards of the other ranks have arrived: bring them into the parameters."""
        if scratch is not None:
            for offset, target in self._incoming:
                target.copy_(scratch[offset : offset + target.numel()])
        # Last: the dense copy must hold all shards before the parameter gets it.
        for storage in self._copies:
            storage.publish()

    def _remember_copies(self) -> None:
        """What to copy, and where it lies in the bucket, for parameters in their own memory."""
        self._outgoing: list[tuple[int, torch.Tensor]] = []
        self._incoming: list[tuple[int, torch.Tensor]] = []
        if self.flat is not None:
            return
        # The own part goes out; what lies before and after it in the bucket comes in. These views are kept between steps.
        low, high = self.own_shard.start, self.own_shard.stop
        for param, storage in self.storages.items():
            first = self.offset_of[param]
            last = first + storage.spec.numel
            ours = (max(first, low), min(last, high))
            for begin, end, into in (
                (*ours, self._outgoing),
                (first, min(last, low), self._incoming),
                (max(first, high), last, self._incoming),
            ):
                if begin < end:
                    into.append((begin, storage.flat[begin - first : end - first]))


def _flat_gradient(storage: ParameterStorage) -> torch.Tensor | None:
    grad = storage.param.grad
    return None if grad is None else flatten(grad.detach(), storage.spec)


# -- the way back to all ranks ---------------------------------------------------------------------


@dataclass(slots=True)
class _Flight:
    shard: Shard
    work: Work
    buffer: torch.Tensor | None
    scratch: torch.Tensor | None
    started_ns: int


class Gathering:
    """The gathers of one optimizer. Every rank launches the same ones in the same order, and finishes them in it.

    Owns the scratch memory through which parameters travel that lie in memory of their own: two buffers per dtype
    and device, so that one bucket is packed while another is in flight.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        # Oldest first. What was launched first is finished first, on every rank, whichever arrives first.
        self._pending: deque[_Flight] = deque()
        self._sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        self._buffers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        # How often a buffer of this kind was handed out: the next one is that which was used longest ago.
        self._taken: dict[tuple[torch.dtype, torch.device], int] = {}
        # Of shared parameters, which are in place as soon as all ranks have written.
        self._written: list[Shard] = []

    def provide(self, shards: list[Shard]) -> None:
        """Be ready for these shards. Memory is taken when the first is launched: many partitions are never stepped."""
        self.finish()
        self._buffers, self._taken, self._sizes = {}, {}, {}
        for shard in shards:
            if shard.flat is None:
                key = (shard.bucket.dtype, shard.device)
                self._sizes[key] = max(self._sizes.get(key, 0), shard.shard_numel * self.collectives.world)

    def _next_buffer(self, key: tuple[torch.dtype, torch.device]) -> torch.Tensor:
        if key not in self._buffers:
            dtype, device = key
            self._buffers[key] = [self.collectives.allocate(self._sizes[key], dtype, device) for _ in range(_NUM_BUFFERS)]
            self._taken[key] = 0
        self._taken[key] += 1
        return self._buffers[key][self._taken[key] % _NUM_BUFFERS]

    def launch(self, shard: Shard) -> None:
        """Start gathering the shard's bucket; finishes older ones first if memory is short."""
        if shard.is_shared:
            self._written.append(shard)
            return
        buffer = scratch = None
        if shard.flat is None:
            buffer = self._next_buffer((shard.bucket.dtype, shard.device))
            # The bucket that used it before must be copied out of it before another is packed into it.
            while any(flight.buffer is buffer for flight in self._pending):
                self._finish_oldest()
            scratch = buffer[: shard.shard_numel * self.collectives.world]
        started_ns = trace.now_ns()
        work = shard.launch_gather(self.collectives, scratch)
        self._pending.append(_Flight(shard, work, buffer, scratch, started_ns))

    def finish(self) -> None:
        """Return when every parameter launched so far is equal on all ranks."""
        while self._pending:
            self._finish_oldest()
        # Shared parameters are not gathered: when all ranks are here, all have written their shards in place.
        if self._written:
            self.barrier()
            for shard in self._written:
                shard.remember_writes()
            self._written.clear()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.collectives.barrier("a barrier around shared parameters")

    def _finish_oldest(self) -> None:
        flight = self._pending.popleft()
        shard = flight.shard
        self.collectives.wait(flight.work, f"gathering the parameters of bucket {shard.index}")
        shard.finish_gather(flight.scratch)
        if trace.recorder is not None:
            attributes = {"bucket": shard.index, "bytes": shard.bucket.num_bytes}
            trace.recorder.span(trace.GATHER, flight.started_ns, trace.now_ns(), **attributes)
