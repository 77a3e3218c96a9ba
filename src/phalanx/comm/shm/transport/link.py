"""The link between two processes of one host: a signal each way, a socket, and each other's memory.

A signal is an eventfd in semaphore mode, one for each direction of each pair, so that a waiting
rank knows exactly who has arrived. It is also the only thing that publishes memory: the kernel
takes the same lock in the write and in the read of an eventfd, so everything stored before
`signal` is visible after the matching wait, on every architecture. Plain loads and stores of
shared memory promise nothing of the kind and are never used to synchronise.

The socket carries what is rare (a failure, leaving) and, by reaching its end, tells of a
process that died without saying so.
"""

from __future__ import annotations

import json
import os
import select
import socket
from dataclasses import dataclass
from enum import Enum

from ...memory.arena import PeerArena

_MAX_NOTICE_BYTES = 16_384


class NoticeKind(Enum):
    """What a rank tells the others of its group outside any collective."""

    LEAVING = "leaving"  # it leaves, having finished what it started
    FAILURE = "failure"  # it failed, or saw another fail
    TIMEOUT = "timeout"  # it waited for longer than the group's time limit
    DEATH = "death"  # never sent: the socket ended without a notice


@dataclass(frozen=True)
class Notice:
    """One message on a link's socket."""

    kind: NoticeKind
    text: str = ""
    ranks: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """The notice as one packet, its text cut to fit."""
        text = self.text[: _MAX_NOTICE_BYTES // 8]
        return json.dumps({"kind": self.kind.value, "text": text, "ranks": self.ranks}).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Notice:
        """The inverse of `encode`. An empty packet is the end of the socket."""
        if not packet:
            return cls(NoticeKind.DEATH)
        fields = json.loads(packet)
        return cls(NoticeKind(fields["kind"]), fields["text"], tuple(fields["ranks"]))


def make_signal() -> int:
    """A signal, as a file descriptor that counts its arrivals and never blocks."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)


class Link:
    """This process's end of the link to one peer. Owns every descriptor given to it."""

    def __init__(
        self,
        peer: int,
        connection: socket.socket,
        inbox: int,
        outbox: int,
        control: PeerArena,
        memory: PeerArena,
    ) -> None:
        self.peer = peer  # its rank in the group; its global rank once the group has met
        self.inbox = inbox
        self.outbox = outbox
        self.control = control
        self.memory = memory
        self.notice: Notice | None = None
        self.connection = connection
        connection.setblocking(False)
        self._poller: select.poll | None = None

    def signal(self) -> None:
        """Publish everything stored so far to the peer, and count one arrival there."""
        os.eventfd_write(self.outbox, 1)

    def arrived(self) -> bool:
        """Consume one arrival of the peer, if there is one."""
        try:
            os.eventfd_read(self.inbox)
        except BlockingIOError:
            return False
        return True

    def poller(self, *other_fds: int) -> select.poll:
        """What to block in while waiting for this peer: its signal, or anything on the other descriptors."""
        if self._poller is None:
            self._poller = select.poll()
            for fd in (self.inbox, *other_fds):
                self._poller.register(fd, select.POLLIN)
        return self._poller

    def tell(self, notice: Notice) -> None:
        """Send a notice if the peer can still be reached. Never blocks, never raises."""
        try:
            self.connection.send(notice.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # gone, or its socket is full: either way it will learn from the socket's end

    def listen(self) -> Notice | None:
        """The next notice of the peer, if any; the first one is kept in `notice`."""
        try:
            packet = self.connection.recv(_MAX_NOTICE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        notice = Notice.decode(packet)
        if self.notice is None:
            self.notice = notice
        return notice

    def close(self) -> None:
        """Close every descriptor. The peer sees the end of the socket."""
        self.connection.close()
        os.close(self.inbox)
        os.close(self.outbox)
