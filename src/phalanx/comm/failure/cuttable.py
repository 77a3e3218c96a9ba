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

import torch
import torch.distributed as dist

_NEVER_SENT = 0x7068616C  # the tag of messages that nobody sends


def has_lost(gloo: Any, place: int) -> bool:
    """Whether gloo has lost its connection to a rank: to ask for a message from it is refused at once then.

    What is asked for is never waited for, which would end the group at the time limit, and forgotten at once.
    """
    try:
        gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], place, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


@dataclass(frozen=True)
class _Connection:
    """A connected TCP socket of this process. The inode tells whether the descriptor still means it."""

    fd: int
    inode: int
    near: str
    far: str


class CuttableGloo:
    """A gloo group, and the sockets it consists of."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        before = _connections()
        # Typed as anything: torch's stubs leave out the methods of backends.
        self.backend: Any = dist.ProcessGroupGloo(store, rank, world, timeout=timeout)
        made = {fd: connection for fd, connection in _connections().items() if before.get(fd) != connection}
        self._connections = _shared(made, store, rank, world, timeout)

    def cut(self) -> None:
        """Shut the group's connections down. It cannot be used any more, by any rank."""
        for connection in self._connections:
            try:
                if os.fstat(connection.fd).st_ino == connection.inode:
                    with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                        # Reading only. gloo takes the end of its input for the end of the peer and closes, but a
                        # write of its own that fails can leave the sender waiting until the time limit.
                        duplicate.shutdown(socket.SHUT_RD)
            except OSError:
                pass  # closed by then, which is as good


def _connections() -> dict[int, _Connection]:
    connections = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        ends = str(connection.getsockname()[:2]), str(connection.getpeername()[:2])
                        connections[int(name)] = _Connection(int(name), status.st_ino, *ends)
        except OSError:
            continue  # closed since it was listed, or not connected
    return connections


def _shared(
    made: Mapping[int, _Connection], store: dist.Store, rank: int, world: int, timeout: timedelta
) -> list[_Connection]:
    """Those of the connections made with the group whose other end another rank has seen being made.

    Another thread may have opened a connection of its own at the same time, which must not be cut.
    """
    keys = [f"connections/{r}" for r in range(world)]
    store.set(keys[rank], json.dumps([(connection.near, connection.far) for connection in made.values()]))
    store.wait(keys, timeout)
    far_ends = {
        (far, near) for value in store.multi_get(keys) for near, far in json.loads(value)
    }
    return [connection for connection in made.values() if (connection.near, connection.far) in far_ends]
