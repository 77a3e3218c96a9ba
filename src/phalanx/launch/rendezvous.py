"""What torch's elastic agent asks before it starts workers: which hosts take part, and where their workers meet.

Torch's own answer keeps a pickle in a store that listens on every interface, and the launcher unpickles what it
finds there; whoever reaches the port runs code as the launcher's user. Here one host asks nobody and opens nothing
(`OneHost`), and several exchange plain values after both sides proved a shared secret (`ManyHosts`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from phalanx.comm.failure.waiting import Notice
from phalanx.launch.environment import LOOPBACK
from phalanx.launch.hosts.company import Company, HostsStore
from phalanx.launch.hosts.meeting import Invitation, meet
from phalanx.launch.store import RUN_STORE, ReservedPort, RunStore

MEETING_S = 900.0
"""How long hosts wait for each other."""

# What gloo, nccl and torch's RPC read to know on which interface to listen. By default each takes the one that the
# host's name resolves to.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Rendezvous(RendezvousHandler):
    """The part that both kinds share."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Add to a worker's environment what it needs to meet the others; called at each start."""

    def leave(self, words: str) -> str:
        """The run has ended here: well with empty `words`. Returns what ended it elsewhere, if that is known."""
        return ""

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else looks at whether this one is closed."""

    def shutdown(self) -> bool:
        return True


class OneHost(Rendezvous):
    """All workers are started here. The store is a file in memory; no socket listens."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self._store = RunStore()
        self._port = ReservedPort()
        self._path = ""

    use_agent_store = False  # a script that connects to MASTER_PORT by itself must also listen there

    def get_backend(self) -> str:
        return "one-host"

    def next_rendezvous(self) -> RendezvousInfo:
        self._path = self._store.renew()
        # For the agent alone, which writes down the workers' numbers and reads them back.
        own = dist.HashStore()
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port.number))

    def num_nodes_waiting(self) -> int:
        return 0

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        environ[RUN_STORE] = self._path
        _listen_on(LOOPBACK, environ)

    def leave(self, words: str) -> str:
        self._store.close()
        self._port.close()
        return ""


class ManyHosts(Rendezvous):
    """Workers on several hosts, whose launchers share a secret."""

    use_agent_store = True  # the head serves MASTER_PORT, and every worker is a client

    def __init__(self, invitation: Invitation, nproc: int, number: int | None, notice: Notice) -> None:
        super().__init__(invitation.run_id)
        self._invitation = invitation
        self._start = (nproc, number, notice)
        self._company: Company | None = None

    def get_backend(self) -> str:
        return "many-hosts"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._company is None:
            # Not earlier: the agent's signal handlers are in place now, and this may take long.
            self._company = meet(self._invitation, *self._start, MEETING_S)
        place = self._company.join(MEETING_S)
        store = HostsStore(self._company, f"{place.round}/")
        workers_meet = RendezvousStoreInfo(place.store_address, place.store_port)
        return RendezvousInfo(store, place.rank, place.hosts, workers_meet)

    def num_nodes_waiting(self) -> int:
        return 0 if self._company is None else self._company.news()

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        if self._company is not None:
            _listen_on(self._company.address, environ)

    def leave(self, words: str) -> str:
        if self._company is None:
            return ""
        # Workers here may have failed only because others did: ask before saying so.
        elsewhere = self._company.verdict(2.0 if words else 0.0)
        self._company.leave("" if elsewhere else words)
        return elsewhere or ("" if words else self._company.verdict(0.0))


def _listen_on(address: str, environ: MutableMapping[str, str]) -> None:
    """Have the workers' transports listen on the interface of `address` alone, unless the user named another."""
    interface = interface_of(address)
    for variable in _INTERFACE_VARIABLES:
        if interface is not None and not os.environ.get(variable):
            environ[variable] = interface


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`; for loopback any of its addresses will do."""
    loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    for name, entries in psutil.net_if_addrs().items():
        found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if address in found or (loopback and any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found)):
            return str(name)
    return None
