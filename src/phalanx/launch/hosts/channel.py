"""A connection between two launchers that both know the secret: proof first, then JSON in signed frames.

    head    → member   magic, nonce                      48 bytes
    member  → head     nonce, proof                      64 bytes
    head    → member   proof                             32 bytes
    then, each way     length, signature, JSON           at most 1 MiB

A proof is an HMAC of both nonces under a key made of the secret and the run's id, different for each side, so that
neither can be played back or reflected. Until the proof holds, nothing that came from the peer is looked at other
than those bytes. Every frame is signed with its number under a key of this connection alone: a frame that was
changed, repeated, left out or put in ends the connection. Frames are not encrypted, and hold nothing worth it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from phalanx.errors import CommunicationError

_MAGIC = b"phalanx hosts 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_MAX_FRAME_BYTES = 1 << 20
_LONGEST_LOOK_S = 1.0


class ChannelError(CommunicationError):
    """The connection ended, or what came over it cannot be from a launcher of this run."""


# What making sense of a message may raise. Its sender has proved the secret, and may be of another version all the same.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class NotAdmittedError(ChannelError):
    """The peer could not prove that it knows the secret of this run."""


class HungUpError(NotAdmittedError):
    """The peer ended the connection where its own proof was due: it refused ours, or it is busy, or has ended."""


class _Patience:
    """A time limit, of which each look counts a second at most: a launcher that was stopped (Ctrl-Z, a suspended job), as
    the others most likely were, does not take that time for their silence."""

    def __init__(self, seconds: float) -> None:
        self._left_s, self._looked_at = seconds, time.monotonic()

    def look(self) -> float:
        """How many seconds are left."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._left_s


class Channel:
    """Messages to and from one launcher that proved the secret. Used by one thread at a time."""

    def __init__(self, connection: socket.socket, key: bytes, outward: bytes, inward: bytes) -> None:
        self._connection = connection
        self._keys = _sign(key, b"frames", outward), _sign(key, b"frames", inward)
        self._sent = self._received = 0
        self._unread = bytearray()
        self.here: str = connection.getsockname()[0]
        self.there: str = connection.getpeername()[0]

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send one message. Raises ChannelError when the peer does not take it in time."""
        payload = json.dumps(message).encode()
        if len(payload) > _MAX_FRAME_BYTES:
            raise ChannelError(f"a message of {len(payload)} bytes is too long for {self.there}")
        signature = _sign(self._keys[0], _NUMBER.pack(self._sent), payload)
        self._sent += 1
        try:
            self._connection.settimeout(max(timeout_s, 0.001))
            self._connection.sendall(_LENGTH.pack(len(payload)) + signature + payload)
        except OSError as error:
            raise ChannelError(f"cannot send to {self.there}: {error}") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises ChannelError when none comes in time, or one that the peer did not sign."""
        patience = _Patience(timeout_s)
        (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size, patience))
        if length > _MAX_FRAME_BYTES:
            raise ChannelError(f"{self.there} announces a message of {length} bytes")
        return self._open(_read(self._connection, _PROOF_BYTES, patience), _read(self._connection, length, patience))

    def fileno(self) -> int:
        """To wait on, before `take`."""
        return self._connection.fileno()

    def take(self) -> list[dict[str, Any]]:
        """What has come by now, without waiting. Raises ChannelError when the connection has ended, as `receive` does;
        what came before that is told first."""
        ended = self._read_now()
        found = []
        while (frame := self._next_frame()) is not None:
            found.append(self._open(*frame))
        if ended and not found:
            raise ChannelError(ended)
        return found

    def _read_now(self) -> str:
        """Why there is no more to come; empty while there may be."""
        # No more than it takes for one frame: what is on the way may be put there by others, faster than it is read.
        while len(self._unread) < _LENGTH.size + _PROOF_BYTES + _MAX_FRAME_BYTES:
            try:
                # Each call: to send sets a time limit, which Python would wait for here.
                self._connection.setblocking(False)
                piece = self._connection.recv(_MAX_FRAME_BYTES)
            except (BlockingIOError, InterruptedError):
                return ""
            except OSError as error:
                return f"the connection ended: {error}"
            if not piece:
                return "the connection was closed"
            self._unread += piece
        return ""

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        begin = _LENGTH.size + _PROOF_BYTES
        if len(self._unread) < begin:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > _MAX_FRAME_BYTES:
            raise ChannelError(f"{self.there} announces a message of {length} bytes")
        if len(self._unread) < begin + length:
            return None
        frame = bytes(self._unread[_LENGTH.size : begin]), bytes(self._unread[begin : begin + length])
        del self._unread[: begin + length]
        return frame

    def _open(self, signature: bytes, payload: bytes) -> dict[str, Any]:
        if not hmac.compare_digest(signature, _sign(self._keys[1], _NUMBER.pack(self._received), payload)):
            raise ChannelError(f"a message from {self.there} does not bear its signature")
        self._received += 1
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise ChannelError(f"{self.there} sent what is no JSON") from None
        if not isinstance(message, dict):
            raise ChannelError(f"{self.there} sent a {type(message).__name__}, expected an object")
        return message

    def close(self) -> None:
        """End the connection, also for a thread that waits on it. Closing twice is harmless."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self._connection.close()


def admit(connection: socket.socket, secret: bytes, run_id: str, timeout_s: float) -> Channel:
    """The head's side: let the peer in if it proves the secret, else raise NotAdmittedError."""
    patience = _Patience(timeout_s)
    key, ours = _run_key(secret, run_id), secrets.token_bytes(_NONCE_BYTES)
    _write(connection, _MAGIC + ours, patience)
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES, patience)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _sign(key, b"member", ours, theirs)):
        raise NotAdmittedError("it has another secret or --run-id")
    _write(connection, _sign(key, b"head", ours, theirs), patience)
    return Channel(connection, _sign(key, b"session", ours, theirs), b"head", b"member")


def enter(connection: socket.socket, secret: bytes, run_id: str, timeout_s: float) -> Channel:
    """The member's side: prove the secret, and have the head prove it too; NotAdmittedError where either fails."""
    patience = _Patience(timeout_s)
    key, ours = _run_key(secret, run_id), secrets.token_bytes(_NONCE_BYTES)
    opening = _read(connection, len(_MAGIC) + _NONCE_BYTES, patience)
    if not opening.startswith(_MAGIC):
        raise NotAdmittedError("what listens there is not phalanx run, or one of another version")
    theirs = opening[len(_MAGIC) :]
    _write(connection, ours + _sign(key, b"member", theirs, ours), patience)
    try:
        proof = _read(connection, _PROOF_BYTES, patience)
    except ChannelError:
        raise HungUpError("it refused our secret, or was started with another --run-id") from None
    if not hmac.compare_digest(proof, _sign(key, b"head", theirs, ours)):
        raise NotAdmittedError("it does not know the secret of this run")
    return Channel(connection, _sign(key, b"session", theirs, ours), b"member", b"head")


def _run_key(secret: bytes, run_id: str) -> bytes:
    return _sign(secret, _MAGIC, run_id.encode())


def _sign(key: bytes, *parts: bytes) -> bytes:
    signature = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        # With its length: two ways to cut the same bytes must not sign alike.
        signature.update(_LENGTH.pack(len(part)) + part)
    return signature.digest()


def _write(connection: socket.socket, data: bytes, patience: _Patience) -> None:
    try:
        connection.settimeout(max(patience.look(), 0.001))
        connection.sendall(data)
    except OSError as error:
        raise ChannelError(f"the connection ended: {error}") from None


def _read(connection: socket.socket, count: int, patience: _Patience) -> bytes:
    data = b""
    while len(data) < count:
        remaining = patience.look()
        if remaining <= 0:
            raise ChannelError("no answer in time")
        try:
            connection.settimeout(min(remaining, _LONGEST_LOOK_S))
            piece = connection.recv(count - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise ChannelError(f"the connection ended: {error}") from None
        if not piece:
            raise ChannelError("the connection was closed")
        data += piece
    return data
