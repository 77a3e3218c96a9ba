"""A collective on its way: the object that goes from the caller through the lane to the operation, and its signature.

A call's tensors are as the caller gave them until its turn comes, and flat from then on. Its signature is what the ranks of
a team compare, as bytes, before they do it. Must not know how any collective is carried out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cached_property, lru_cache

import torch

from ....errors import MismatchError


class ReduceOp(IntEnum):
    """How elements of several ranks become one, as c10d names it. A mean is a sum with a scale."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6


class Verb(IntEnum):
    """The collectives that travel through shared memory."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7


_REDUCES = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# Verb, dtype, op, root, numel, scale, layout. Padding is written as zeros: ranks compare the bytes.
_PACKED = struct.Struct("<BBBxiqdI")
PACKED_BYTES = _PACKED.size
ANY_ROOT = -1
UNSET = timedelta(milliseconds=-1)  # c10d's sign for "the group's own time limit"


class Call:
    """One collective. `outputs` are written and `inputs` read; a verb that works in place has outputs only.

    Where one tensor per rank is due (the outputs of ALL_GATHER, the inputs of REDUCE_SCATTER), a list of one
    stands for its equal successive parts; `whole` is then that tensor. `sizes` are everybody's numbers of
    bytes, for GATHER only: a rank that receives nothing has no outputs to tell them by. `results` are the tensors
    that the caller knows, where they are not the outputs: one tensor of which these are parts, or fewer than one per rank.
    """

    __slots__ = ("_copied", "inputs", "op", "outputs", "results", "root", "scale", "sizes", "timeout", "verb", "whole")

    def __init__(
        self,
        verb: Verb,
        outputs: Sequence[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] = (),
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        root: int = ANY_ROOT,
        timeout: timedelta = UNSET,
    ) -> None:
        self.verb = verb
        self.outputs = outputs
        self.inputs = inputs
        self.op = op
        self.scale = scale
        self.root = root
        self.timeout = timeout  # the lane sets it; a call within another one is made with it
        self.whole: torch.Tensor | None = None
        self.sizes: tuple[int, ...] = ()
        self.results: Sequence[torch.Tensor] | None = None
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flatten(self, rank: int, world: int) -> None:
        """Make every tensor flat and contiguous, by a view where possible and else by a copy. Complex ones that are to be
        reduced become pairs of reals.

        Only when the call's turn has come: a call queued before it may still write to its tensors.
        """
        # Values go back only to tensors that the verb writes on this rank. Another one may be expanded, and
        # then cannot be written to at all.
        if self.verb is Verb.REDUCE:
            writes = self.root == rank
        else:
            writes = self.verb is not Verb.BROADCAST or self.root != rank
        outputs = self.outputs = [self._flat(tensor, writes) for tensor in self.outputs]
        if not self.inputs:
            return
        inputs = self.inputs = [self._flat(tensor, False) for tensor in self.inputs]
        if self.verb is Verb.ALL_GATHER and len(outputs) == 1:
            self.outputs = parts(outputs[0], world)
        elif self.verb is Verb.REDUCE_SCATTER and len(inputs) == 1:
            self.whole = inputs[0]
            self.inputs = parts(inputs[0], world)
        if self._overwrites_inputs(rank):
            self.inputs, self.whole = [tensor.clone() for tensor in self.inputs], None

    def restore(self) -> None:
        """Put results back into the tensors that had to be copied."""
        for tensor, flat in self._copied:
            with torch.inference_mode(tensor.is_inference()):
                tensor.data.copy_(flat.view(tensor.shape))

    def _overwrites_inputs(self, rank: int) -> bool:
        """Whether an output lies on an input that is still to be read then, as of ranks that gather into what they send.

        Allowed is the piece that a rank keeps, at its own place, and what is exchanged for a piece of the same place.
        """
        written = [_span(output) for output in self.outputs]
        for nth, tensor in enumerate(self.inputs):
            begin, end = _span(tensor)
            for place, (first, last) in enumerate(written):
                stays = (begin, end) == (first, last) and self._is_own(nth, place, rank)
                if begin < last and first < end and not stays:
                    return True
        return False

    def _is_own(self, nth: int, place: int, rank: int) -> bool:
        if self.verb is Verb.ALL_GATHER:
            return place == rank
        return nth == (rank if self.verb is Verb.REDUCE_SCATTER else place)

    def _flat(self, tensor: torch.Tensor, writes: bool) -> torch.Tensor:
        # `data` rather than `detach`: a collective is no operation of autograd, and counts as no change of
        # the tensor, as with any other backend.
        data = tensor.data
        if not tensor.is_contiguous() or tensor.is_inference() or _stands_for_another(data):
            flat = data.clone(memory_format=torch.contiguous_format).view(-1)
            if writes:
                self._copied.append((tensor, flat))
        elif data.dim() == 1 and data.numel() > 1:
            flat = data
        else:
            flat = data.view(-1)
            # One element or none lies in order whatever its stride, which torch does not set right.
            flat = flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))
        if flat.is_complex() and self.verb in _REDUCES:
            return torch.view_as_real(flat).view(-1)
        return flat


def gather_call(outputs: Sequence[torch.Tensor], input: torch.Tensor, root: int, world: int) -> Call:
    """Fill `outputs[r]` with rank r's `input` on `root`; the others have no outputs."""
    nothing = input.new_empty(0)
    given = [input if rank == root else nothing for rank in range(world)]
    call = Call(Verb.ALL_TO_ALL, outputs or [nothing] * world, given)
    call.results = outputs
    return call


def scatter_call(output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, world: int) -> Call:
    """Fill `output` with what `root` has in `inputs[rank]`; the others have no inputs."""
    nothing = output.new_empty(0)
    taken = [output if rank == root else nothing for rank in range(world)]
    call = Call(Verb.ALL_TO_ALL, taken, inputs or [nothing] * world)
    call.results = [output]
    return call


def parts(whole: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The equal successive parts of a flat tensor."""
    numel = whole.numel() // num_parts
    return [whole[index * numel : (index + 1) * numel] for index in range(num_parts)]


def _stands_for_another(data: torch.Tensor) -> bool:
    """Whether the values are not those of the memory, but their conjugates or negatives: peers read the memory."""
    return data.is_conj() or data.is_neg()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory of a flat tensor begins and ends."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor's memory, as uint8."""
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


# -- what ranks compare ----------------------------------------------------------------------------


class Signature:
    """A collective's arguments, as far as they must be equal on all ranks.

    Made through `signature`, which remembers: a training step repeats the same few.
    """

    def __init__(
        self,
        verb: Verb,
        dtype: torch.dtype,
        numel: int,
        op: ReduceOp,
        root: int,
        scale: float,
        layout: int,
    ) -> None:
        self.verb = verb
        self.dtype = dtype
        self.numel = numel
        self.op = op
        self.root = root
        self.scale = scale
        self.layout = layout
        self.name = verb.name.lower()

    # Made once per signature, not once per collective: the ranks compare these bytes in every opening step.
    @cached_property
    def packed(self) -> bytes:
        """The signature as bytes of fixed length."""
        code = _DTYPE_CODES[self.dtype]
        return _PACKED.pack(self.verb, code, self.op, self.root, self.numel, self.scale, self.layout)

    def __str__(self) -> str:
        if self.verb is Verb.BARRIER:
            return "barrier"
        text = f"{self.name} of {self.numel} x {str(self.dtype).removeprefix('torch.')}"
        if self.verb in (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER):
            text += f" by {self.op.name.lower()}"
            text += f" scaled by {self.scale:g}" if self.scale != 1.0 else ""
        text += " in unequal pieces" if self.layout else ""
        return text + (f" with root {self.root}" if self.root != ANY_ROOT else "")


@lru_cache(maxsize=1024)
def signature(
    verb: Verb,
    dtype: torch.dtype = torch.uint8,
    numel: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    root: int = ANY_ROOT,
    scale: float = 1.0,
    layout: int = 0,
) -> Signature:
    """The signature with these arguments."""
    return Signature(verb, dtype, numel, op, root, scale, layout)


def unpacked(packed: bytes) -> Signature:
    """The inverse of `Signature.packed`."""
    verb, code, op, root, numel, scale, layout = _PACKED.unpack(packed)
    return signature(Verb(verb), DTYPES[code], numel, ReduceOp(op), root, scale, layout)


def different_calls(rank: int, ranks: Sequence[int], calls: Sequence[Signature]) -> MismatchError:
    """The error on `rank` when `ranks` have called what is in `calls`."""
    listing = ", ".join(f"rank {each}: {call}" for each, call in zip(ranks, calls, strict=True))
    return MismatchError(
        f"rank {rank}: the ranks call different collectives: {listing}. "
        "Call the same collectives in the same order, with equal sizes, on every rank. Most often one rank has fewer "
        "batches (worker.loader(loader, model) or model.join() see to that), or a call stands inside `if rank == 0`."
    )


@lru_cache(maxsize=1024)
def layout_of(sizes: tuple[int, ...]) -> int:
    """A number that differs, as good as surely, between two divisions into pieces; 0 for equal pieces."""
    # Sizes of any number of pieces have to fit a header of fixed length.
    return 0 if len(set(sizes)) == 1 else zlib.crc32(repr(sizes).encode())
