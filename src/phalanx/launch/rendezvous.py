"""Before workers are started: which hosts take part, which numbers the workers get, and where they meet.

Torch's own answer keeps a pickle in a store that listens on every interface, and the launcher unpickles what it
finds there; whoever reaches the port runs code as the launcher's user. Here one host asks nobody and opens nothing
(`OneHost`), and several exchange plain values after both sides proved a shared secret (`ManyHosts`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import replace

import psutil

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import CommunicationError
from phalanx.launch.environment import LOOPBACK
from phalanx.launch.hosts.company import Company, HostsStore
from phalanx.launch.hosts.meeting import Invitation, meet
from phalanx.launch.records.ends import EndsFile
from phalanx.launch.store import ReservedPort, RunStore
from phalanx.launch.supervise.numbering import Round, first_rank
from phalanx.launch.variables import ENDS, RUN_STORE

MEETING_S = 900.0
"""How long hosts wait for each other."""
_ENDING_S = 30.0
"""How long a host whose workers have ended well waits for the others' to end, so that none is cut off."""

# What gloo, nccl and torch's RPC read to know on which interface to listen. By default each takes the one that the
# host's name resolves to.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Rendezvous(ABC):
    """How the supervisor learns of other hosts."""

    def __init__(self, run_id: str, nproc: int) -> None:
        self.run_id = run_id
        self._nproc = nproc
        self._ends = EndsFile()

    @abstractmethod
    def next_round(self) -> Round:
        """Wait until it is known who takes part in the next start. Raises HostsEnded when there is none."""

    @abstractmethod
    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Add to a worker's environment what it needs to meet the others; called at each start."""

    @abstractmethod
    def leave(self, words: str) -> str:
        """The run has ended here: well with empty `words`. Returns what ended it elsewhere, if that is known."""

    @abstractmethod
    def wait_for_others(self) -> None:
        """The workers here have ended well: wait a while for those of the other hosts."""

    def num_hosts_waiting(self) -> int:
        """How many hosts wait for this one to begin a new round. Raises HostsEnded when the run is over elsewhere."""
        return 0

    def note_end(self, rank: int, exitcode: int) -> None:
        """A worker of this host has ended by itself: told to those who may be waiting for it to come."""
        self._ends.note(rank, exitcode)

    def workers_met(self) -> bool | None:
        """Whether any worker has looked for the others; None where that cannot be told."""
        return None


class OneHost(Rendezvous):
    """All workers are started here. The store is a file in memory; no socket listens."""

    def __init__(self, run_id: str, nproc: int) -> None:
        super().__init__(run_id, nproc)
        self._store = RunStore()
        self._port = ReservedPort()
        self._path = ""

    def next_round(self) -> Round:
        self._path = self._store.renew()
        self._ends.begin()
        # Not served: a script that connects to MASTER_PORT by itself must also listen there.
        return Round(0, 1, 0, self._nproc, LOOPBACK, self._port.number, is_served=False)

    def wait_for_others(self) -> None:
        """There are none."""

    def workers_met(self) -> bool | None:
        return self._store.was_used

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        environ[RUN_STORE] = self._path
        environ[ENDS] = self._ends.path
        _listen_on(LOOPBACK, environ)

    def leave(self, words: str) -> str:
        self._store.close()
        self._port.close()
        self._ends.close()
        return ""


class Apart(OneHost):
    """The workers of one host of several in an elastic run. Who takes part the first host's coordinator decides, and where
    they meet; here it is only said on which interface they listen."""

    def __init__(self, run_id: str, nproc: int, address: str = LOOPBACK) -> None:
        super().__init__(run_id, nproc)
        self.address = address
        """This host's own, towards the others. Known to hosts other than the first when they have joined."""
        self.nproc = nproc

    def next_round(self) -> Round:
        # Served: each generation's store is in the first host's launcher, which outlives every rank.
        return replace(super().next_round(), is_served=True)

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        super().prepare(environ)
        _listen_on(self.address, environ)

    def workers_met(self) -> bool | None:
        return None


class ManyHosts(Rendezvous):
    """Workers on several hosts, whose launchers share a secret."""

    def __init__(self, invitation: Invitation, nproc: int, number: int | None, notice: Notice) -> None:
        super().__init__(invitation.run_id, nproc)
        self._invitation = invitation
        self._start = (nproc, number, notice)
        self._company: Company | None = None
        self._round: tuple[HostsStore, int, int] | None = None

    def next_round(self) -> Round:
        if self._company is None:
            # Not earlier: signal handlers are in place now, and this may take long.
            self._company = meet(self._invitation, *self._start, MEETING_S)
        self._ends.begin()
        is_complete = False
        while not is_complete:
            place = self._company.join(MEETING_S)
            store = HostsStore(self._company, f"{place.round}/")
            self._round = store, place.rank, place.hosts
            store.set(f"workers/{place.rank}", str(self._nproc))
            said = [f"workers/{rank}" for rank in range(place.hosts)]
            is_complete = store.is_set_in_this_round(said)
        workers = [int(count) for count in store.multi_get(said)]
        first, world = first_rank(workers, place.rank), sum(workers)
        # Served: the head has a store at that address, and every worker is a client.
        return Round(place.rank, place.hosts, first, world, place.store_address, place.store_port, is_served=True)

    def num_hosts_waiting(self) -> int:
        return 0 if self._company is None else self._company.news()

    def wait_for_others(self) -> None:
        if self._round is None:
            return
        store, rank, hosts = self._round
        # What became of a host that never says so is found out by `leave`.
        with contextlib.suppress(CommunicationError):
            store.set(f"ended/{rank}", "well")
            store.wait([f"ended/{other}" for other in range(hosts)], _ENDING_S)

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        environ.pop(RUN_STORE, None)  # of a run that this one was started in, which the other hosts do not have
        environ[ENDS] = self._ends.path
        if self._company is not None:
            _listen_on(self._company.address, environ)

    def leave(self, words: str) -> str:
        self._ends.close()
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
