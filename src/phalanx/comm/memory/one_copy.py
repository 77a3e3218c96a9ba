"""Memory of one host that all ranks of a group read and write: one physical copy, whatever the backend.

An anonymous memory file of rank 0, reached by the others through /proc while rank 0 holds it open. The kernel frees it
with the last mapping, so nobody's memory goes away under another, and a crash leaves nothing behind. Linux only.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
from pathlib import Path

import torch

from ...errors import CommunicationError, ConfigError
from ..collectives import Collectives

_NUMBER = 1 << 31


def _host_mark() -> list[int]:
    """Numbers that are the same for two processes that see each other's /proc, and only for those."""
    seen = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(source)
        if path.exists():
            seen.append(os.readlink(path) if path.is_symlink() else path.read_text())
    digest = hashlib.sha256("\n".join(seen).encode()).digest()
    return [int.from_bytes(digest[at : at + 4], "little") % _NUMBER for at in (0, 4, 8)]


def allocate_one_copy(numel: int, dtype: torch.dtype, collectives: Collectives) -> torch.Tensor:
    """A zeroed flat tensor that is the same memory on every rank. Every rank calls it and returns at the same time."""
    num_bytes = max(1, numel * dtype.itemsize)
    # Told to the others in place of raised at once: they would wait for this rank, which may live on.
    failed: CommunicationError | None = None
    fd, tensor = -1, torch.zeros(0, dtype=torch.uint8, device="cpu")
    try:
        if collectives.rank == 0:
            try:
                fd = _make(num_bytes)
            except CommunicationError as error:
                failed = error
        mine = torch.tensor([*_host_mark(), os.getpid(), fd], dtype=torch.int64, device="cpu")
        everyone = torch.zeros(collectives.world * mine.numel(), dtype=torch.int64, device="cpu")
        collectives.wait(collectives.all_gather(everyone, mine), "finding memory to share")
        rows = everyone.view(collectives.world, -1).tolist()
        numbers = collectives.ranks.numbers
        elsewhere = [rank for rank, row in zip(numbers, rows, strict=True) if row[:3] != rows[0][:3]]
        if elsewhere:
            raise ConfigError(
                f"{collectives.me}: ranks {elsewhere} run on another host (or container) than rank {numbers[0]}, so they "
                "cannot share memory with it. Use shared_parameters=False."
            )
        if rows[0][4] >= 0:
            try:
                tensor = _mapped(fd, num_bytes) if fd >= 0 else _opened(rows[0][3], rows[0][4], num_bytes)
            except CommunicationError as error:
                failed = error
        # Also because rank 0 must not close the file before everybody has it.
        have = torch.zeros(collectives.world, device="cpu", dtype=torch.float32)
        have[collectives.rank] = float(failed is None)
        collectives.all_reduce_now(have, "sharing memory")
        if failed is not None:
            raise failed
        without = [rank for rank, has in zip(numbers, have.tolist(), strict=True) if not has]
        if without:
            named = ", ".join(map(str, without))
            raise CommunicationError(f"{collectives.me}: rank {named} got no memory to share.", without)
    finally:
        if fd >= 0:
            os.close(fd)
    return tensor.view(dtype)[:numel] if numel else torch.zeros(0, dtype=dtype, device="cpu")


def _make(num_bytes: int) -> int:
    fd = os.memfd_create("phalanx-one-copy", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise CommunicationError(f"out of shared memory: asked for {num_bytes} bytes: {error}.") from error
    return fd


def _opened(pid: int, number: int, num_bytes: int) -> torch.Tensor:
    path = f"/proc/{pid}/fd/{number}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommunicationError(
            f"cannot open {path}, the shared memory of rank 0: {error}. Run all ranks as one user, or use "
            "shared_parameters=False."
        ) from error
    try:
        return _mapped(fd, num_bytes)
    finally:
        os.close(fd)


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    # The tensor's storage keeps the mapping.
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
