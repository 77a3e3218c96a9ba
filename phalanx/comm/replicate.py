"""Making every rank hold what one rank holds: parameters at the start, buffers before a forward.

Tensors of any dtype travel as bytes, many in one collective. Must not know of modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .collectives import Collectives
from .patience import Patience

CHUNK_BYTES = 25 * 1024 * 1024


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


def _restore(tensor: torch.Tensor, data: torch.Tensor) -> None:
    # A slice of the byte buffer need not be aligned for the tensor's dtype; a copy of it is.
    aligned = data.clone()
    if tensor.is_complex():
        real = torch.float64 if tensor.dtype is torch.complex128 else torch.float32
        values = torch.view_as_complex(aligned.view(real).view(-1, 2))
    else:
        values = aligned.view(tensor.dtype)
    # Through .data: an earlier forward may have saved the tensor (BatchNorm does), and its backward is to go on
    # with the values that this writes, which are those of the rank all are to follow.
    tensor.data.copy_(values.view(tensor.shape))


@torch.no_grad()
def replicate(
    tensors: Sequence[torch.Tensor], collectives: Collectives, patience: Patience, source: int, what: str
) -> None:
    """Overwrite `tensors` on every rank by those of rank `source`. Same shapes and dtypes everywhere."""
    wanted = [tensor for tensor in tensors if tensor.numel()]
    for chunk in _chunks(wanted):
        parts = [_bytes(tensor) for tensor in chunk]
        buffer = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        sizes = [part.numel() for part in parts]
        del parts
        patience.wait(collectives.broadcast(buffer, source), f"{what} from rank {source}")
        if collectives.rank != source:
            for tensor, data in zip(chunk, buffer.split(sizes), strict=True):
                _restore(tensor, data)
