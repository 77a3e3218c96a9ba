"""Who listens at the endpoint and who connects to it, and where the workers of several hosts meet.

The endpoint is an address given in words: one of the first host's own, never "all of them". The launcher that can
listen there is the head; the others connect. What c10d itself opens for the workers, its TCPStore, knows no secret:
it is bound to the endpoint's address alone, on a port that only proven hosts are told, and the kernel drops what
comes from the addresses of other hosts. docs/design/launch.md says what this does not stop.
"""

from __future__ import annotations

import errno
import importlib
import ipaddress
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import ConfigError
from phalanx.launch.hosts.company import Company
from phalanx.launch.hosts.filter import admit_only
from phalanx.launch.hosts.head import Head
from phalanx.launch.hosts.member import meet_head
from phalanx.launch.hosts.rounds import Host, Rounds
from phalanx.launch.start.starter import signals_blocked

_EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::", "0", "any", "all"})


@dataclass(frozen=True)
class Invitation:
    """What every host of a run is started with."""

    endpoint: str
    fewest: int
    most: int
    restartable: bool
    run_id: str
    secret: bytes

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


def meet(invitation: Invitation, nproc: int, number: int | None, notice: Notice, timeout_s: float) -> Company:
    """Become the head or a member. A member waits here for the head to answer; nobody waits for a round yet."""
    name = socket.gethostname()
    limits = (invitation.fewest, invitation.most)
    key = (invitation.secret, invitation.run_id)
    listener = listen(invitation, number)
    if listener is not None:
        # Whoever keeps the workers' store needs torch, and no other launcher does. Now, and not when the store is made:
        # that would keep the other hosts waiting for an answer, who would take this one for lost.
        with signals_blocked():
            importlib.import_module("torch.distributed")
        rounds = Rounds(*limits, restartable=invitation.restartable)
        worker_store = WorkerStore(listener.getsockname()[0], notice)
        return Head(listener, Host(0, name, nproc, number), rounds, key, worker_store.renew, notice)
    return meet_head(invitation.address, Host(-1, name, nproc, number), limits, key, notice, timeout_s)


def check_endpoint(endpoint: str) -> str:
    """`endpoint`, if it is HOST:PORT with one host; raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--endpoint should be HOST:PORT, such as head:29500; got {endpoint!r}")
    if host.strip("[]").lower() in _EVERYWHERE:
        raise _everywhere(endpoint)
    try:
        host.encode("idna")  # as whatever looks it up does, and fails in words of its own
    except UnicodeError:
        raise ConfigError(f"--endpoint {endpoint!r}: no host can have that name") from None
    return endpoint


def _everywhere(endpoint: str) -> ConfigError:
    return ConfigError(
        f"--endpoint {endpoint} means every interface of a host. Name one address of the first host, the one that leads to "
        "the other hosts."
    )


def listen(invitation: Invitation, number: int | None) -> socket.socket | None:
    """A socket listening at the endpoint, or None where another host's launcher is to be found there."""
    if number is not None and number != 0:
        return None
    host, port = invitation.address
    family, address = _resolve(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run that are still fading away do not count; a listener of this moment does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if number is None and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None  # another host's address, or another launcher of this host was first
        raise ConfigError(
            f"this host cannot listen at --endpoint {host}:{port} ({address}): {error.strerror}. Give an address of the "
            "first host's own, and a port that is free there."
        ) from None
    return listener


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--endpoint: the host {host!r} is not known here: {error.strerror}") from None
    family, _, _, _, sockaddr = found[0]
    address = str(sockaddr[0])
    mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    if mapped is not None:
        family, address = socket.AF_INET, str(mapped)  # as its packets are, which the filter looks at
    if ipaddress.ip_address(address).is_unspecified:
        raise _everywhere(host)  # 0, 0x0, 0.0, ::0: it has more names than one could list
    named_so = host == "localhost" or _is_literal(host)
    if ipaddress.ip_address(address).is_loopback and not named_so:
        # Many installations map a host's own name to 127.0.1.1, where nobody else could reach it.
        raise ConfigError(
            f"--endpoint: {host} is {address} here, which other hosts cannot reach (see /etc/hosts). Give the address "
            "itself."
        )
    return family, address


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class WorkerStore:
    """The c10d store of a round's workers on several hosts, in the head's process."""

    def __init__(self, address: str, notice: Notice) -> None:
        self._address = address
        self._notice = notice
        self._store: Any = None
        self._told = False

    def renew(self, peers: set[str]) -> tuple[str, int]:
        """A new store for workers on hosts with these addresses; the one of the round before is dropped."""
        import torch.distributed as dist

        self._store = None
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Before it listens, so that there is no moment in which others get through.
        is_filtered = admit_only(listener, peers)
        listener.bind((self._address, 0))
        listener.listen(socket.SOMAXCONN)
        port = int(listener.getsockname()[1])
        if not is_filtered and not self._told:
            self._told = True
            self._notice(
                f"the kernel does not filter by {len(peers)} addresses here: whoever reaches {self._address}:{port} can "
                "read and write the workers' store. Use a network that only the hosts of the run are on (SECURITY.md)."
            )
        self._store = dist.TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return self._address, port
