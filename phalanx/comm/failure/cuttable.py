"""gloo groups that can be cut: what waits in them, here or on a peer, raises at once.

c10d's gloo backend has no abort: a collective whose peer does not come waits for the time limit, and
so does the destruction of the group. Its sockets can be shut down, though, and gloo then reports a
broken connection to everything that uses them.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class _Line:
    """A connected TCP socket of this process. The inode tells whether the descriptor still means it."""

    fd: int
    inode: int
    near: str
    far: str


class CuttableGloo:
    """A gloo group, and the sockets it consists of."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        before = _lines()
        # Typed as anything: torch's stubs leave out the methods of backends.
        self.backend: Any = dist.ProcessGroupGloo(store, rank, world, timeout=timeout)
        made = {fd: line for fd, line in _lines().items() if before.get(fd) != line}
        self._lines = _with_both_ends_here(made, store, rank, world, timeout)

    def cut(self) -> None:
        """Shut the group's connections down. It cannot be used any more, by any rank."""
        for line in self._lines:
            try:
                if os.fstat(line.fd).st_ino == line.inode:
                    with socket.socket(fileno=os.dup(line.fd)) as connection:
                        # Reading only. gloo takes the end of its input for the end of the peer and closes, but a
                        # write of its own that fails can leave the sender waiting until the time limit.
                        connection.shutdown(socket.SHUT_RD)
            except OSError:
                pass  # closed by then, which is as good


def _lines() -> dict[int, _Line]:
    lines = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        ends = str(connection.getsockname()[:2]), str(connection.getpeername()[:2])
                        lines[int(name)] = _Line(int(name), status.st_ino, *ends)
        except OSError:
            continue  # closed since it was listed, or not connected
    return lines


def _with_both_ends_here(
    made: Mapping[int, _Line], store: dist.Store, rank: int, world: int, timeout: timedelta
) -> list[_Line]:
    """Those of the lines made while the group was that also another rank saw being made.

    Another thread may have opened a connection of its own at the same time, which must not be cut.
    """
    keys = [f"lines/{r}" for r in range(world)]
    store.set(keys[rank], json.dumps([(line.near, line.far) for line in made.values()]))
    store.wait(keys, timeout)
    far_ends = {
        (far, near) for value in store.multi_get(keys) for near, far in json.loads(value)
    }
    return [line for line in made.values() if (line.near, line.far) in far_ends]
