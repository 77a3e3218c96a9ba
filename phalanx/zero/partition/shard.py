"""This rank's slice of one bucket: the tensors that its local optimizer steps, and the way back to all ranks.

    stage      param memory                         pieces' `.grad`
    idle       equal on all ranks                   none (or the mean, where the reducer scatters)
    taken      equal on all ranks                   slices of the averaged gradients
    stepped    own slice new, the others old        as before
    gathering  own slice new, the others in flight  free
    idle       equal on all ranks, new              free

Owns the pieces. Must not know of the optimizer, nor when a step happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...comm.collectives import Collectives, Work
from ...errors import MismatchError, ReductionError
from ...plan import Bucket, ParamSpec
from ...plan.shards import Piece, pieces_of, slice_numel
from .storage import ParameterStorage, flatten

# Elements of one piece on a CPU. Optimizers pass over a tensor a dozen times; a piece of this size, with its
# gradient and state, stays in the cache in between, which makes a step of Adam two to three times faster than on the
# whole; smaller ones cost more calls, larger ones fall out of the cache (docs/design/zero.md has the numbers).
CPU_CHUNK = 196608


# Makes the memory of a bucket in which parameters are to live.
Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class LivePiece:
    """A piece and the tensor that stands for it in the local optimizer."""

    __slots__ = ("_inside", "index", "member", "piece", "tensor")

    def __init__(self, piece: Piece, index: int, member: ParameterStorage) -> None:
        """`index` is the parameter's number in the optimizer."""
        self.piece = piece
        self.index = index
        self.member = member
        # An edge has memory of its own: the elements beside the owned ones belong to another rank.
        data = torch.zeros(self.length, dtype=member.flat.dtype, device=member.flat.device)
        self.tensor = torch.nn.Parameter(data if piece.is_edge else self._in_place(), requires_grad=False)
        self._inside = self.tensor.detach()[self._owned] if piece.is_edge else None

    @property
    def length(self) -> int:
        """Elements computed."""
        return self.piece.end - self.piece.begin

    @property
    def _owned(self) -> slice:
        return slice(self.piece.start - self.piece.begin, self.piece.stop - self.piece.begin)

    def _in_place(self) -> torch.Tensor:
        return self.shaped(self.member.flat[self.piece.begin : self.piece.end])

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """Values for this piece in its tensor's shape: flat, but without dimensions for a scalar parameter."""
        return values if self.member.spec.shape else values.view(())

    def owned(self, values: torch.Tensor) -> torch.Tensor:
        """The owned part of a tensor in the shape of this piece, flat."""
        return values.view(-1)[self._owned]

    def reseat(self) -> None:
        """The parameter has other memory now."""
        if not self.piece.is_edge:
            self.tensor.data = self._in_place()

    def load(self) -> None:
        """Before a step: an edge gets the parameter's values."""
        if self._inside is not None:
            self._inside.copy_(self.member.flat[self.piece.start : self.piece.stop])

    def store(self) -> None:
        """After a step: an edge gives its owned part back."""
        if self._inside is not None:
            self.member.flat[self.piece.start : self.piece.stop].copy_(self._inside)


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
        self.slice_numel = slice_numel(bucket.numel, collectives.world)
        self._rank = collectives.rank
        self.flat: torch.Tensor | None = None
        if allocate is not None:
            self.flat = allocate(self.slice_numel * collectives.world, bucket.dtype, self.device)
        self.is_shared = is_shared
        # Of shared parameters, when they were last written by an optimizer; None before that.
        self._versions: list[int] | None = None
        self.members = {
            slot.param: ParameterStorage(params[slot.param], specs[slot.param], self._home(slot.offset, slot.numel))
            for slot in bucket.slots
        }
        self.offset_of = {slot.param: slot.offset for slot in bucket.slots}
        chunk = CPU_CHUNK if self.device.type == "cpu" else None
        pieces = pieces_of(bucket, collectives.world, collectives.rank, chunk)
        self.pieces = [LivePiece(piece, numbers[piece.param], self.members[piece.param]) for piece in pieces]
        self._edges = [piece for piece in self.pieces if piece.piece.is_edge]
        self._shadows = [member for member in self.members.values() if member.is_shadow]
        self._remember_copies()

    def _home(self, offset: int, numel: int) -> torch.Tensor | None:
        return None if self.flat is None else self.flat.narrow(0, offset, numel)

    # -- before a step -------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether this bucket takes part in a step. The same on all ranks, which must gather alike."""
        return any(param.requires_grad or param.grad is not None for param in self.params)

    def refresh(self) -> None:
        """Look where the parameters are, and bring their values to where the pieces see them."""
        if self._versions is not None:
            self._refuse_writes(self._versions)
        moved = [member for member in self.members.values() if member.refresh()]
        if moved:
            for piece in self.pieces:
                if piece.member in moved:
                    piece.reseat()
            self._shadows = [member for member in self.members.values() if member.is_shadow]
            self._remember_copies()
        for edge in self._edges:
            edge.load()

    def _refuse_writes(self, versions: Sequence[int]) -> None:
        for member, version in zip(self.members.values(), versions, strict=True):
            if member.param._version != version or member.has_moved:
                raise MismatchError(
                    f"{member.spec.name} was written outside the optimizer since the last step. With shared_parameters=True "
                    "that changes it under every rank at once. Load parameters before the first step, or make the "
                    "optimizer anew."
                )

    def remember_writes(self) -> None:
        """All ranks have stepped: any write to a shared parameter from now on is somebody else's."""
        if self.is_shared:
            self._versions = [member.param._version for member in self.members.values()]

    def take_gradients(self) -> None:
        """Give every piece its slice of its parameter's `.grad`, or none."""
        latest: ParameterStorage | None = None
        flat: torch.Tensor | None = None
        for piece in self.pieces:
            if piece.member is not latest:
                latest = piece.member
                flat = _flat_gradient(latest)
            begin, end = piece.piece.begin, piece.piece.end
            piece.tensor.grad = None if flat is None else piece.shaped(flat[begin:end])

    def drop_gradients(self) -> None:
        for piece in self.pieces:
            piece.tensor.grad = None

    # -- after a step --------------------------------------------------------------------------

    def store(self) -> None:
        """What was stepped beside the parameters goes back into them."""
        for edge in self._edges:
            edge.store()

    @property
    def own_slice(self) -> slice:
        return slice(self._rank * self.slice_numel, (self._rank + 1) * self.slice_numel)

    def launch_gather(self, collectives: Collectives, scratch: torch.Tensor | None) -> Work:
        """Send the own slice to all ranks; without a bucket buffer it travels through `scratch`."""
        flat = self.flat
        if flat is None:
            assert scratch is not None, "parameters in their own memory travel through scratch memory"
            flat = scratch
            for offset, source in self._outgoing:
                flat[offset : offset + source.numel()].copy_(source)
        return collectives.all_gather(flat, flat[self.own_slice])

    def finish_gather(self, scratch: torch.Tensor | None) -> None:
        """The slices of the other ranks have arrived: bring them into the parameters."""
        if scratch is not None:
            for offset, target in self._incoming:
                target.copy_(scratch[offset : offset + target.numel()])
        for member in self._shadows:
            member.publish()

    def _remember_copies(self) -> None:
        """What to copy, and where it lies in the bucket, for parameters in their own memory."""
        self._outgoing: list[tuple[int, torch.Tensor]] = []
        self._incoming: list[tuple[int, torch.Tensor]] = []
        if self.flat is not None:
            return
        low, high = self.own_slice.start, self.own_slice.stop
        for param, member in self.members.items():
            first = self.offset_of[param]
            last = first + member.spec.numel
            ours = (max(first, low), min(last, high))
            for begin, end, copies in (
                (*ours, self._outgoing),
                (first, min(last, low), self._incoming),
                (max(first, high), last, self._incoming),
            ):
                if begin < end:
                    copies.append((begin, member.flat[begin - first : end - first]))


def _flat_gradient(member: ParameterStorage) -> torch.Tensor | None:
    grad = member.param.grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise ReductionError(
            f"{member.spec.name} has a {grad.layout} gradient, which cannot be cut into slices. Use a layer with "
            'dense gradients (Embedding(sparse=False)), or partition="parameter".'
        )
    return flatten(grad.detach(), member.spec)
