"""Memory of the device "sim": tensors of a PrivateUse1 device whose bytes lie in CPU memory.

A tensor goes there by DLPack: a capsule of a CPU tensor, in which the device is exchanged before torch takes it back. What
comes out is a true tensor of the device (storage, views, autograd), and its storage owns the CPU tensor, so the end of
that one's life is the moment at which the device's allocator gets the memory back.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .clocks import Block, Lane, Ledger, place

_EXTENSION_DEVICE = 12  # kDLExtDev, which torch takes for PrivateUse1
_DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)  # DLTensor begins with its data pointer
_MOST_RUNS = 256  # more separate pieces than this are taken for one range

ledger = Ledger()
_blocks: dict[int, Block] = {}  # by the address of their first byte
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def adopt(source: torch.Tensor, owner: Lane) -> torch.Tensor:
    """`source`, a fresh CPU tensor that nobody else holds, as a tensor of the device, allocated on stream `owner`."""
    if source.untyped_storage().nbytes() == 0:
        # An address of its own, too: `data_ptr` must tell empty tensors from others.
        source = torch.empty(64, dtype=torch.uint8).view(source.dtype)[:0].as_strided(source.shape, source.stride())
    address = source.untyped_storage().data_ptr()
    block = Block(owner, place())
    capsule = torch._C._to_dlpack(source)
    device = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + _DEVICE_OFFSET)
    device[0], device[1] = _EXTENSION_DEVICE, 0
    with ledger.lock:
        _blocks[address] = block
    weakref.finalize(source.untyped_storage(), _freed, address, block).atexit = False
    return torch._C._from_dlpack(capsule)


def _freed(address: int, block: Block) -> None:
    with ledger.lock:
        if _blocks.get(address) is block:
            del _blocks[address]
    ledger.free(block)


def is_sim(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "sim"


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a CPU tensor. Does not keep them alive."""
    storage = tensor.untyped_storage()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def block_of(tensor: torch.Tensor) -> Block:
    """The allocation that a tensor of the device lies in."""
    with ledger.lock:
        found = _blocks.get(tensor.untyped_storage().data_ptr())
    assert found is not None, "a tensor of the device that this module has not made"
    return found


def use_of(tensor: torch.Tensor) -> tuple[Block, list[tuple[int, int]]]:
    """The tensor's bytes, as the ledger takes them."""
    return block_of(tensor), list(byte_ranges(tensor))


def byte_ranges(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The ranges of bytes that a tensor covers, within its storage."""
    if tensor.numel() == 0:
        return
    item, start = tensor.element_size(), tensor.storage_offset()
    # From the tightest dimension outwards: what follows on without a gap joins the run, the rest is repeated.
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    dims = sorted((abs(stride), size) for size, stride in sizes if size > 1 and stride)
    run, repeated = 1, []
    for stride, size in dims:
        if stride <= run:
            run = max(run, stride * (size - 1) + run)
        else:
            repeated.append((stride, size))
    if math.prod(size for _, size in repeated) > _MOST_RUNS:
        run, repeated = run + sum(stride * (size - 1) for stride, size in repeated), []
    for steps in itertools.product(*(range(size) for _, size in repeated)):
        low = start + sum(step * stride for step, (stride, _) in zip(steps, repeated, strict=True))
        yield low * item, (low + run) * item


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(part, change) for part in value)
    return value
