"""The arena: memory that is handed out, given back, and not held when nobody uses it."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from phalanx.comm.memory import extent
from phalanx.comm.memory.arena import Arena, PeerArena
from phalanx.errors import CommunicationError

MIB = 1 << 20
NUMEL = 8 * MIB // 4


def held(arena: Arena) -> int:
    """Bytes of memory behind the file, as the kernel counts them."""
    return os.fstat(arena.fd).st_blocks * 512


def test_a_place_is_used_again() -> None:
    arena = Arena("test")
    first = arena.allocate(NUMEL, torch.float32)
    place = arena.locate(first)
    first.fill_(1.0)
    del first
    second = arena.allocate(NUMEL, torch.float32)
    assert arena.locate(second) == place
    assert not second.any()


def test_free_memory_goes_back_to_the_kernel_when_it_does_not_fit() -> None:
    arena = Arena("test")
    small = [arena.allocate(NUMEL, torch.float32) for _ in range(4)]
    before = held(arena)
    assert before >= 32 * MIB
    small.clear()
    large = arena.allocate(5 * NUMEL, torch.float32)
    assert held(arena) < before + 16 * MIB, "the four small places are not held beside the large one"
    assert large.numel() == 5 * NUMEL


def test_memory_that_went_back_serves_again_and_peers_see_it() -> None:
    arena = Arena("test")
    peer = PeerArena(os.dup(arena.fd))
    small = arena.allocate(NUMEL, torch.float32)
    small.fill_(1.0)
    place = arena.locate(small)
    assert place is not None
    assert peer.view(place, NUMEL, torch.float32)[-1] == 1.0
    del small
    large = arena.allocate(5 * NUMEL, torch.float32)
    again = arena.allocate(NUMEL, torch.float32)
    assert arena.locate(again) == place and not again.any()
    again.fill_(2.0)
    seen = peer.view(place, NUMEL, torch.float32)
    assert bool((seen == 2.0).all())
    assert not large.any()


def test_what_is_held_stays_close_to_what_is_used() -> None:
    arena = Arena("test")
    tensors = [arena.allocate(NUMEL, torch.float32) for _ in range(10)]
    used = sum(tensor.nbytes for tensor in tensors)
    assert held(arena) <= 1.25 * used


def test_a_place_that_cannot_be_refilled_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena("test")
    small = arena.allocate(NUMEL, torch.float32)
    place = arena.locate(small)
    del small
    large = arena.allocate(5 * NUMEL, torch.float32)  # the small place has gone back by now
    monkeypatch.setattr(extent, "_available_bytes", lambda: 1)
    with pytest.raises(CommunicationError, match=f"asked for {NUMEL * 4} bytes"):
        arena.allocate(NUMEL, torch.float32)
    monkeypatch.undo()
    assert arena.locate(arena.allocate(NUMEL, torch.float32)) == place
    assert large.numel() == 5 * NUMEL


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "ulimit -v")])
def test_a_mapping_that_is_refused_names_the_limit(monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("phalanx.comm.memory.extent.mmap.mmap", refuse)
    with pytest.raises(CommunicationError, match=remedy):
        Arena("test")
