"""How the ranks of one host find each other: addresses through the store, descriptors over unix sockets.

Each rank listens under a random abstract address and puts it in the store. Every pair connects
once, the higher rank to the lower, and each side hands over its memory files and the signal on
which it will listen to the other. Both check that the other runs as the same user, and that it
read the address of this very group from the store. Afterwards nothing remains but the links:
abstract addresses are no files, and go with the listening socket.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ....errors import CollectiveTimeout, CommunicationError, PeerFailure
from ...memory.arena import Arena, PeerArena
from .link import Link, make_signal

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as SO_PEERCRED gives them
_MAX_HELLO_BYTES = 4096
_RETRY_S = 0.02
_LOOK_S = 0.05  # how often a rank that waits for another asks the store, which refuses if that one will not come


@dataclass(frozen=True)
class Address:
    """Where a rank can be met, as published in the store."""

    host: str
    name: str
    token: str

    def encode(self) -> str:
        """The address as a value for the store."""
        return json.dumps([self.host, self.name, self.token])

    @classmethod
    def decode(cls, value: bytes) -> Address:
        """The inverse of `encode`."""
        return cls(*json.loads(value))


class Rendezvous:
    """One rank's part in the rendezvous of a group. Use once, then close."""

    def __init__(self, store: dist.Store, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> None:
        """`global_ranks` is how messages name the ranks of the group, of which this is number `rank`."""
        self.rank = rank
        self.world = len(global_ranks)
        self._names = global_ranks
        self._me = f"rank {global_ranks[rank]}"
        self._store = store
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Random, so that groups never collide. Other users can read it in /proc/net/unix, but not the token,
        # which is in the store only.
        self._name = f"phalanx-{secrets.token_hex(16)}"
        self._token = secrets.token_hex(16)

    def announce(self, host: str) -> list[str]:
        """Publish this rank's address; return the host of every rank of the group."""
        self._listener.bind("\0" + self._name)
        self._listener.listen(self.world)
        self._store.set(_key(self.rank), Address(host, self._name, self._token).encode())
        return [self._address(rank).host for rank in range(self.world)]

    def meet(self, members: Sequence[int], control: Arena, memory: Arena) -> Mapping[int, Link]:
        """Link up with the other `members`, the ranks of this host; each of them calls this."""
        inboxes = {peer: make_signal() for peer in members if peer != self.rank}
        connections: dict[int, socket.socket] = {}
        links: dict[int, Link] = {}
        try:
            # Connect to the lower ranks, accept the higher ones, and only then read what the lower ones send: they
            # answer when they accept, for which they may first have to connect to others. In this order nobody
            # waits in a circle.
            for peer in inboxes:
                if peer < self.rank:
                    connections[peer] = self._connect(peer, inboxes[peer], control, memory)
            while len(connections) < len(inboxes):
                peer, link = self._accept(inboxes)
                connections[peer] = link.connection
                links[peer] = link
                self._send_hello(link.connection, "", inboxes[peer], control, memory)
            for peer in inboxes:
                if peer < self.rank:
                    links[peer] = self._receive_answer(peer, connections[peer], inboxes)
        except BaseException:
            # A link owns its descriptors; before it is made, they are ours to close.
            for peer, inbox in inboxes.items():
                if peer in links:
                    links[peer].close()
                else:
                    os.close(inbox)
                    connections[peer].close() if peer in connections else None
            raise
        return {peer: links[peer] for peer in sorted(links)}

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _address(self, rank: int) -> Address:
        # A store that cannot be reached, or a rank that never comes, is the store's own error,
        # which every user of c10d knows.
        self._store.wait([_key(rank)], self._timeout)
        return Address.decode(self._store.get(_key(rank)))

    def _remaining(self, peer: str) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise CollectiveTimeout(
                f"{self._me}: {peer} did not come to the rendezvous of the ranks of this host within "
                f"{self._timeout.total_seconds():g} s. Start every rank, or raise the group's timeout.",
            )
        return remaining

    def _slice(self, peer: str) -> float:
        """How long to block before looking around again."""
        remaining = self._remaining(peer)
        self._store.check([_key(self.rank)])
        return min(_LOOK_S, remaining)

    def _connect(self, peer: int, inbox: int, control: Arena, memory: Arena) -> socket.socket:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = self._address(peer)
            try:
                connection.settimeout(self._remaining(f"rank {self._names[peer]}"))
                connection.connect("\0" + address.name)
                self._check_user(connection)
                self._send_hello(connection, address.token, inbox, control, memory)
                return connection
            except (ConnectionError, TimeoutError, BlockingIOError):
                # The store may still hold the address of an earlier group of the same name, whose
                # listener is gone; the present one will replace it. Or strangers, who can read the address in
                # /proc/net/unix, fill the queue of those who want to connect: the peer turns them away when it accepts.
                connection.close()
                time.sleep(min(_RETRY_S, self._remaining(f"rank {self._names[peer]}")))
            except BaseException:
                connection.close()
                raise

    def _accept(self, inboxes: Mapping[int, int]) -> tuple[int, Link]:
        while True:
            self._listener.settimeout(self._slice("a rank of this host"))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                self._check_user(connection)
                link = self._receive_link(connection, inboxes, self._token)
                return link.peer, link
            except _NotInGroupError:
                # Anybody may connect. Whoever does not belong here must not be able to end the rendezvous.
                connection.close()

    def _check_user(self, connection: socket.socket) -> None:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(packed)
        if user != os.getuid():
            raise _NotInGroupError(
                f"{self._me}: a process of user {user} at the address of a rank of this group, "
                f"expected user {os.getuid()}. Run every rank of a host as the same user."
            )

    def _send_hello(
        self, connection: socket.socket, token: str, inbox: int, control: Arena, memory: Arena
    ) -> None:
        hello = json.dumps([self.rank, token]).encode()
        socket.send_fds(connection, [hello], [inbox, control.fd, memory.fd])

    def _receive_answer(self, peer: int, connection: socket.socket, inboxes: Mapping[int, int]) -> Link:
        try:
            return self._receive_link(connection, inboxes)
        except _NotInGroupError as error:
            # We found its address in the store, and it is of our user: what came instead of an answer is its end.
            text = f"{self._me}: rank {self._names[peer]} ended before the ranks of this host had met. See its own output."
            raise PeerFailure(text, [self._names[peer]]) from error

    def _receive_link(
        self, connection: socket.socket, inboxes: Mapping[int, int], token: str = ""
    ) -> Link:
        while True:
            connection.settimeout(self._slice("a rank of this host"))
            try:
                hello, fds, _, _ = socket.recv_fds(connection, _MAX_HELLO_BYTES, 3)
                for fd in fds:
                    # Python lets what comes this way be inherited, and ignores the flag against it: a program that a rank
                    # starts by `os.system`, and that lives on, would hold the group's memory.
                    os.set_inheritable(fd, False)
                break
            except TimeoutError:
                continue
            except ConnectionError as error:
                raise _NotInGroupError(f"{self._me}: the connection ended: {error}") from error
        try:
            peer, peer_token = json.loads(hello)
            if not secrets.compare_digest(peer_token, token) or peer not in inboxes or len(fds) != 3:
                raise ValueError(f"rank {peer} is not expected here")
        except (ValueError, TypeError, RecursionError) as error:
            for fd in fds:
                os.close(fd)
            raise _NotInGroupError(f"{self._me}: not a rank of this group: {error}") from error
        outbox, control_fd, memory_fd = fds
        return Link(
            peer, connection, inboxes[peer], outbox, PeerArena.attach(control_fd), PeerArena.attach(memory_fd)
        )


class _NotInGroupError(CommunicationError):
    """Somebody who does not belong to the group answered at, or connected to, an address of it."""


def _key(rank: int) -> str:
    return f"phalanx/rendezvous/{rank}"
