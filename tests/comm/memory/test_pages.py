"""Tensors in pages of their own: zeroed, given back at once, and nobody else's in a child."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from phalanx.comm.memory.pages import zeros_in_pages


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000, (1 << 20) + 3], ids=str)
def test_any_size_and_dtype_comes_zeroed_and_can_be_written(numel: int, dtype: torch.dtype) -> None:
    tensor = zeros_in_pages(numel, dtype)
    assert (tensor.numel(), tensor.dtype, tensor.is_contiguous()) == (numel, dtype, True)
    assert not tensor.any()
    tensor.fill_(1)
    assert tensor.all()


def test_pages_are_given_back_when_the_last_view_is_gone() -> None:
    gc.collect()
    before = resident_bytes()
    tensor = zeros_in_pages(16 << 20, torch.float32)
    tensor.fill_(1)
    view = tensor[5:]
    assert resident_bytes() - before > 60_000_000
    del tensor
    assert view.sum() == view.numel()
    assert resident_bytes() - before > 60_000_000
    del view
    assert resident_bytes() - before < 8_000_000


def test_a_forked_child_writes_to_a_copy() -> None:
    tensor = zeros_in_pages(1 << 20, torch.float32)
    child = os.fork()
    if not child:
        tensor[0] = 7.0
        os._exit(int(tensor[0].item()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert tensor[0] == 0.0
