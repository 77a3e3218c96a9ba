"""What workers and their coordinator tell each other: one JSON object per line, over a socket that has no name.

    a worker says                                          when
    {"is": "arrived", "generation", "silent", "why"}       it is at the meeting, after that generation (0: never in one);
                                                           with "timeout_s" if it has a time limit of its own
    {"is": "committed", "version"}                         rank 0, once per generation: it gets on
    {"is": "pausing", "at"}                                rank 0, asked to pause: the others are to pause there too
    {"is": "event", "what", …}                             something that the run's record should have
    {"is": "leaving"}                                      it was asked to leave, by a signal
    {"is": "lost state", "absent"}                         on several hosts: no rank has what was learnt, nor a mirror of it;
                                                           the hosts that have no rank now and may have it

    the coordinator says
    {"is": "form", "generation", "rank", "members", "store", "images", "before", "members_before", "version",
     "has_committed", "since": records (`story`) since the ranks went on last,
     "hosts", "kept": on several hosts, the host of each rank, and files of generations before that are kept here}
    {"is": "pause"}                                        to rank 0: choose a version to pause at
    {"is": "pause", "at"}                                  to the others: come to the meeting when that version is committed
    {"is": "note", "record"}                               something that happened and changes nobody's rank
    {"is": "dismiss"}                                      end well

Must not know what is done about it.
"""

from __future__ import annotations

import json
import select
import socket
from typing import Any

_CHUNK = 65536


class Line:
    """One end of the socket. Owned by whoever made it; not for several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._received = bytearray()
        self._messages: list[dict[str, Any]] = []
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Say something; nothing happens if the other end is gone, which `receive` tells."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, 1.0)
            except OSError:
                self.is_closed = True
                return

    def receive(self, wait_s: float | None = 0.0) -> dict[str, Any] | None:
        """The next message; None if none has come within `wait_s`, or the other end is gone."""
        while not self._messages and not self.is_closed:
            if wait_s != 0.0 and not self._wait(select.POLLIN, wait_s):
                return None
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                return None
            self._received += data
            *lines, rest = self._received.split(b"\n")
            self._received = bytearray(rest)
            self._messages += [json.loads(line) for line in lines]
            if self._messages or wait_s == 0.0:
                break
        return self._messages.pop(0) if self._messages else None

    def _wait(self, what: int, wait_s: float | None) -> bool:
        # Not `select.select`: it takes no number above 1023, and the launcher of a hundred workers has more descriptors.
        poller = select.poll()
        poller.register(self._socket, what)
        return bool(poller.poll(None if wait_s is None else 1000 * wait_s))

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()
