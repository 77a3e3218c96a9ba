"""Making every rank hold what one rank holds: parameters at the start, buffers before a forward.

Tensors of any dtype travel as bytes, many in one collective. Buffers may be replaced by the user at any time, on one rank
alone; so on the CPU, where looking costs nothing, the source says before its bytes what tensors these are. Must not know of
modules.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from ..errors import ConfigError, MismatchError
from .collectives import Collectives
from .memory.copies import copy_all
from .memory.pages import zeros_in_pages

CHUNK_BYTES = 25 * 1024 * 1024
_ALIGNMENT = 64


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors on one device, of at most the chunk size unless one alone is larger."""
    chunk: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and (num_bytes + size > CHUNK_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(tensor)
        num_bytes += size
    if chunk:
        yield chunk


def _buffer_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A byte buffer with room for all of `tensors`, and for each of them its place there, in its shape and dtype."""
    ends: dict[torch.dtype, int] = {}
    for tensor in tensors:
        ends[tensor.dtype] = ends.get(tensor.dtype, 0) + tensor.numel()
    # A section per dtype, so that each begins where its elements may.
    sizes = [-(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype, numel in ends.items()]
    device = tensors[0].device
    if device.type == "cpu":
        buffer = zeros_in_pages(sum(sizes), torch.uint8)
    else:
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    sections = {dtype: part.view(dtype) for dtype, part in zip(ends, buffer.split(sizes), strict=True)}
    views = []
    for tensor in tensors:
        section = sections[tensor.dtype]
        views.append(section[: tensor.numel()].view(tensor.shape))
        sections[tensor.dtype] = section[tensor.numel() :]
    return buffer, views


def _facts(chunk: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """How many tensors these are, of how many bytes together, and a number made of what each is: in one tensor.

    None for a device: looking at what came would make the host wait.
    """
    if chunk[0].device.type != "cpu":
        return []
    return [torch.tensor(_numbers(tuple([(tensor.dtype, tensor.shape) for tensor in chunk])), device="cpu")]


@lru_cache(maxsize=64)  # asked before each forward, of hundreds of buffers that are the same as before
def _numbers(kinds: tuple[tuple[torch.dtype, torch.Size], ...]) -> tuple[int, int, int]:
    num_bytes = sum(dtype.itemsize * shape.numel() for dtype, shape in kinds)
    words = [(str(dtype), *shape) for dtype, shape in kinds]  # the same in every process
    return len(kinds), num_bytes, zlib.crc32(repr(words).encode())


def _others(
    mine: torch.Tensor, said: torch.Tensor, collectives: Collectives, source: int, what: str
) -> MismatchError:
    (num, num_bytes, _), (num_there, bytes_there, _) = mine.tolist(), said.tolist()
    there = collectives.ranks.numbers[source]
    error = MismatchError(
        f"{collectives.me}: {what} from rank {there}: this rank has {num} tensors of {num_bytes} bytes together, "
        f"rank {there} has {num_there} of {bytes_there}, or some of another shape or dtype. Add, remove and replace buffers "
        "on every rank alike."
    )
    # Rank `source` has sent and goes on: it is told at its next collective.
    collectives.refuse(error)
    return error


@torch.no_grad()
def replicate(
    tensors: Sequence[torch.Tensor], collectives: Collectives, source: int, what: str
) -> None:
    """Overwrite `tensors` on every rank by those of rank `source`. Same shapes and dtypes everywhere."""
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < collectives.world:
        raise ConfigError(f"source must be a rank of the group, 0 to {collectives.world - 1}, got {source!r}.")
    wanted = [tensor for tensor in tensors if tensor.numel()]
    for chunk in _chunks(wanted):
        facts = _facts(chunk)
        buffer, views = _buffer_of([*facts, *chunk])
        if collectives.rank == source:
            copy_all(views, [*facts, *chunk])
        collectives.wait(collectives.broadcast(buffer, source), f"{what} from rank {collectives.ranks.numbers[source]}")
        if collectives.rank != source:
            for mine, said in zip(facts, views, strict=False):
                if not torch.equal(said, mine):
                    raise _others(mine, said, collectives, source, what)
            # Through .data: an earlier forward may have saved the tensor (BatchNorm does), and its backward is to go
            # on with the values that this writes, which are those of the rank all are to follow.
            copy_all([tensor.data for tensor in chunk], views[len(facts) :])
