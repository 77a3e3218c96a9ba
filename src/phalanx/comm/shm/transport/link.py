"""The link between two processes of one host: a signal each way, a socket, and each other's memory.

A signal is an eventfd in semaphore mode, one for each direction of each pair, so that a waiting
rank knows exactly who has arrived. It is also the only thing that publishes memory: the kernel
takes the same lock in the write and in the read of an eventfd, so everything stored before
`signal` is visible after the matching wait, on every architecture. Plain loads and stores of
shared memory promise nothing of the kind and are never used to synchronise.

The socket carries what is rare (a failure, leaving) and, by reaching its end, tells of a
process that died without saying so.

`Watch` turns "wait for this peer's signal" into one of: it came; the peer died, left, or reported a
failure; the time limit passed; somebody here called off the wait. Each of the latter is an error, and
the first error is final: it is told to all peers and raised again at every later wait.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from ....errors import CollectiveTimeout, CommunicationError, PeerFailure
from ...failure.waiter import say
from ...failure.waiting import FIRST_S, Waiting
from ...memory.arena import PeerArena

_MAX_NOTICE_BYTES = 16_384

# How often to look for a signal before blocking in the kernel. A look costs about a microsecond,
# being woken up several; looking longer only takes the processor from whoever is to signal.
_LOOKS = 40
# Where ranks outnumber processors, each look lets somebody else run first: whoever is to signal, as a rule.
_CROWDED_LOOKS = 10

_DIED = "See that rank's own output for the reason; the group cannot be used any more."
_LEFT = (
    "Its script has ended, or has destroyed the group. If it had fewer batches, use worker.loader(loader, model) or `with "
    "model.join():`; else see its own output for the reason."
)


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


# -- waiting -------------------------------------------------------------------------------------


class Watch:
    """One rank's watch over its links. One thread waits at a time; any thread may break it.

    `global_rank` and the links' `peer` are the ranks as messages name them.
    """

    def __init__(self, global_rank: int, links: Sequence[Link]) -> None:
        self.global_rank = global_rank
        self.links = tuple(links)
        self.doing = "rendezvous"  # what the ranks are at, for messages
        self._broken: CommunicationError | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._is_crowded = len(links) >= len(os.sched_getaffinity(0))
        self._wake = make_signal()  # for the thread that waits, which alone clears it
        self._notices = select.epoll()
        for link in self.links:
            self._notices.register(link.connection.fileno(), select.EPOLLIN)

    @property
    def broken(self) -> CommunicationError | None:
        """The error that ended this watch, if any."""
        return self._broken

    @property
    def notices_fd(self) -> int:
        """Readable when there is a notice to read."""
        return self._notices.fileno()

    def check(self) -> None:
        """Raise if the watch is broken."""
        if self._broken is not None:
            raise _again(self._broken)

    def wait(self, link: Link, timeout_s: float, stragglers: Callable[[int], Sequence[int]]) -> None:
        """Consume one signal of `link`, or raise. `stragglers`, given who is waited for, says who is missing."""
        for _ in range(_CROWDED_LOOKS if self._is_crowded else _LOOKS):
            if self._is_crowded:
                os.sched_yield()
            if link.arrived():
                return
        started = time.monotonic()
        poller = link.poller(self.notices_fd, self._wake)
        if link.notice is None:
            # Nearly always it is the signal that ends this. All else stays readable until it is read, except a
            # notice of leaving that was read before.
            poller.poll(min(timeout_s, FIRST_S) * 1000)
        waiting: Waiting | None = None
        while not link.arrived():
            _clear(self._wake)
            self.read_notices()
            self.check()
            if link.notice is not None:
                # It may have signalled just before it left.
                if link.arrived():
                    return
                raise _again(self._fail(f"rank {link.peer} left the group", (link.peer,), _LEFT))
            remaining = started + timeout_s - time.monotonic()
            if remaining <= 0:
                raise _again(self._time_out(timeout_s, stragglers(link.peer)))
            waiting = waiting or Waiting(say, started)
            waiting.look(lambda: self._words(stragglers(link.peer)))
            poller.poll(min(remaining, FIRST_S) * 1000)

    def read_notices(self) -> None:
        """Read what peers have to say; break the watch if one of them failed or died. Any thread."""
        with self._reading:
            for link in self.links:
                while link.notice is None and (notice := link.listen()) is not None:
                    self._take(link, notice)

    def break_(self, error: CommunicationError, tell: bool = True) -> CommunicationError:
        """End the watch with `error`, unless it has ended: return the error that did end it."""
        with self._lock:
            if self._broken is not None:
                return self._broken
            self._broken = error
        if tell:
            kind = NoticeKind.TIMEOUT if isinstance(error, CollectiveTimeout) else NoticeKind.FAILURE
            for link in self.links:
                link.tell(Notice(kind, str(error), error.ranks))
        os.eventfd_write(self._wake, 1)
        return error

    def leave(self, reason: CommunicationError) -> None:
        """Tell every peer that this rank leaves, and end the watch."""
        for link in self.links:
            link.tell(Notice(NoticeKind.LEAVING))
        self.break_(reason, tell=False)

    def close(self) -> None:
        """Close every descriptor. No thread may be waiting."""
        self._notices.close()
        os.close(self._wake)
        for link in self.links:
            link.close()

    def _take(self, link: Link, notice: Notice) -> None:
        if notice.kind is NoticeKind.LEAVING:
            # Its socket will end, which is no news any more. Whoever waits for it has to look again.
            self._notices.unregister(link.connection.fileno())
            os.eventfd_write(self._wake, 1)
        elif notice.kind is NoticeKind.DEATH:
            self._fail(f"the process of rank {link.peer} died", (link.peer,), _DIED)
        else:
            kind = CollectiveTimeout if notice.kind is NoticeKind.TIMEOUT else PeerFailure
            # Not told on: whoever noticed first has told everybody.
            self.break_(kind(notice.text, notice.ranks), tell=False)

    def _fail(self, what: str, ranks: tuple[int, ...], remedy: str) -> CommunicationError:
        text = f"rank {self.global_rank}: {what} while rank {self.global_rank} was waiting in {self.doing}. {remedy}"
        return self.break_(PeerFailure(text, ranks))

    def _words(self, ranks: Sequence[int]) -> str:
        return f"rank {self.global_rank} waits for rank {', '.join(map(str, ranks))}, in {self.doing}"

    def _time_out(self, timeout_s: float, ranks: Sequence[int]) -> CommunicationError:
        missing = ", ".join(str(rank) for rank in ranks)
        text = (
            f"rank {self.global_rank}: {self.doing} timed out after {timeout_s:g} s: rank {missing} did not "
            "take part. See what that rank is doing (py-spy dump), or raise the group's timeout."
        )
        return self.break_(CollectiveTimeout(text, tuple(ranks)))


def _again(error: CommunicationError) -> CommunicationError:
    """A fresh copy to raise: a raised exception keeps the frames it went through."""
    return type(error)(str(error), error.ranks)


def _clear(signal: int) -> None:
    try:
        os.eventfd_read(signal)
    except BlockingIOError:
        pass
