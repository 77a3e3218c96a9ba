"""What a rank is about to do, as bytes that the ranks of a team compare before they do it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
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
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# Verb, dtype, op, root, numel, scale, layout. Padding is written as zeros: ranks compare the bytes.
_PACKED = struct.Struct("<BBBxiqdI")
PACKED_BYTES = _PACKED.size
ANY_ROOT = -1


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
