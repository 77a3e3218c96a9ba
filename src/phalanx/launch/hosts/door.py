"""The door of a run: whoever connects to the endpoint and proves the secret is let in, nobody else is listened to.

One thread accepts, one more per connection greets. The number of connections that have not proved anything yet is
bounded: one more takes the place of the oldest, since a host of the run needs milliseconds and whoever holds a connection
without a word must not keep it out. Must not know what the hosts do together: `welcome` does, in the greeting thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from phalanx.comm.failure.waiting import Notice
from phalanx.launch.hosts.channel import Channel, ChannelError, NotAdmittedError, admit

_PROOF_S = 5.0
_MOST_UNPROVEN = 32
_TELL_UNPROVEN_EVERY_S = 10.0
_PAUSE_S = 0.05


class Door:
    """Listens from the moment it is made, until `close`. `key` is the secret and the run's id."""

    def __init__(
        self, listener: socket.socket, key: tuple[bytes, str], welcome: Callable[[Channel], None], notice: Notice
    ) -> None:
        self._listener = listener
        self._secret, self._run_id = key
        self._welcome, self._notice = welcome, notice
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []  # the oldest first
        self._closed = False
        self._unproven_told = 0.0
        host, port = listener.getsockname()[:2]
        self.address: str = host
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._accept, name="phalanx-hosts", daemon=True).start()

    def close(self) -> None:
        """Nobody comes in any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed; or no descriptor is left, or a connection broke before it was taken. The next may come through.
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._unproven.append(connection)
                if len(self._unproven) > _MOST_UNPROVEN:
                    with contextlib.suppress(OSError):  # it went by itself
                        self._unproven[0].shutdown(socket.SHUT_RDWR)
                    del self._unproven[0]
            try:
                threading.Thread(target=self._greet, args=(connection,), name="phalanx-host", daemon=True).start()
            except RuntimeError:
                # No thread can be had now. Whoever it was may knock again; the door must not stay shut for good.
                self._forget(connection)
                connection.close()
                time.sleep(_PAUSE_S)

    def _greet(self, connection: socket.socket) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._forget, connection)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                there = connection.getpeername()[0]
                channel = admit(connection, self._secret, self._run_id, _PROOF_S)
        except NotAdmittedError as error:
            connection.close()
            self._tell_of_stranger(f"{there} was not let in: {error}")
        except (ChannelError, OSError):
            connection.close()  # a scanner, a health check, or a host that was stopped
        else:
            self._welcome(channel)

    def _forget(self, connection: socket.socket) -> None:
        """It has proved the secret, or has not."""
        with self._lock, contextlib.suppress(ValueError):  # another has its place
            self._unproven.remove(connection)

    def _tell_of_stranger(self, words: str) -> None:
        now = time.monotonic()
        if now - self._unproven_told > _TELL_UNPROVEN_EVERY_S:
            self._unproven_told = now
            self._notice(words)
