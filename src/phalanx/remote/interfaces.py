"""Network interfaces and listening sockets: where RPC may listen, and where it really does.

Torch's RPC runs whatever it is sent, so the address it listens on is all the protection it has.
See docs/remote-security.md.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.errors import ArgumentTypeError, ConfigError

_EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::", "0", "any", "all"})


class Interface(NamedTuple):
    """A network interface and its IPv4 address."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def find_interface(wanted: str | None) -> Interface:
    """The interface of that name or address; loopback for None; an error for "all of them"."""
    interfaces = _interfaces()
    if wanted is None:
        for interface in interfaces:
            if interface.is_loopback:
                return interface
        raise ConfigError("this host has no loopback interface with an IPv4 address; name an interface.")
    if not isinstance(wanted, str):
        raise ArgumentTypeError(
            f"interface is the name or the IPv4 address of one, of {_listed(interfaces)}, got {wanted!r:.80}."
        )
    if wanted.strip().lower() in _EVERYWHERE:
        raise ConfigError(
            f"interface={wanted!r} means every interface of this host. RPC has no authentication and runs "
            f"what it is sent: name the one that leads to the other workers, of {_listed(interfaces)}."
        )
    for interface in interfaces:
        if wanted in interface:
            return interface
    raise ConfigError(f"interface={wanted!r}: there is none of that name or IPv4 address, only {_listed(interfaces)}.")


def resolve(host: str) -> str:
    """The IPv4 address of `host`."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"the master address {host!r} does not resolve to an IPv4 address: {error}.") from error


def listening() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def listen_on(address: str, port: int) -> socket.socket:
    """A socket listening on that address only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise ConfigError(f"rank 0 cannot listen on {address}:{port}: {error}. Choose a free MASTER_PORT.") from error
    return listener


def network_identity() -> str:
    """Equal for processes that share one loopback: the same kernel and the same network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _interfaces() -> list[Interface]:
    return [
        Interface(name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def _listed(interfaces: list[Interface]) -> str:
    return ", ".join(f"{interface.name} ({interface.address})" for interface in interfaces) or "none"
