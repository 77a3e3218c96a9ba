"""Starting and stopping torch's RPC so that it listens where it was told to, and nowhere else.

Three things listen: the store through which workers meet, the gloo group that RPC uses while it
starts, and TensorPipe itself. By default the store listens on every interface and the other two on
whatever the host's name resolves to. Here all three get one named address, loopback unless told
otherwise, and the sockets are looked at afterwards.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from phalanx.comm.failure.arrivals import Arrivals, is_tcp, own_connection
from phalanx.comm.failure.board import launcher_serves_store
from phalanx.comm.failure.interruption import interruptible
from phalanx.comm.failure.processes import identity
from phalanx.errors import ArgumentTypeError, CommunicationError, ConfigError, RemoteError
from phalanx.remote.interfaces import (
    Interface,
    find_interface,
    listen_on,
    listening,
    network_identity,
    resolve,
)
from phalanx.remote.lifeline import Lifeline

_SCHEME = "phalanx-remote"
SHUTDOWN_S = 60.0
"""How long the last step of a graceful end may take: all workers are in it at the same time."""
# TensorPipe's shared-memory transport polls without sleeping: an idle worker keeps a core busy that the
# training next to it needs. It also opens an abstract unix socket, which no choice of interface confines.
_TRANSPORTS = ["uv"]
_LOCK = threading.Lock()
# The store on its way to `init_rpc`, which takes stores from rendezvous handlers only.
_MEETING: list[dist.Store] = []


class Session:
    """RPC as started by `init`. Leaving it as a context shuts RPC down: gracefully, waiting for all
    workers, unless an exception is on its way out."""

    def __init__(self, name: str, interface: Interface) -> None:
        self.name = name
        self.interface = interface
        self._running = True
        # Rank 0's end of the meeting, so that it can be closed: torch keeps the store that uses it for good.
        self._listener: socket.socket | None = None
        self._lifeline: Lifeline | None = None

    def shutdown(self, graceful: bool = True, timeout_s: float = SHUTDOWN_S) -> None:
        """Stop RPC on this worker. Graceful serves on until every worker that lives has done the same.

        Raises RemoteError, RPC being stopped all the same, if one has died or left by an exception meanwhile. `timeout_s`
        bounds the last step, in which all workers take part at the same time; 0 waits without limit.
        """
        if not self._running:
            return
        self._running = False
        wrong = self._lifeline.wait_for_others() if graceful and self._lifeline is not None else {}
        try:
            # What waits for a worker that is no more would wait for ever.
            rpc.shutdown(graceful=graceful and not wrong, timeout=timeout_s)
        finally:
            if self._lifeline is not None:
                self._lifeline.close(badly=bool(wrong) or not graceful)
            self._stop_listening()
        if wrong:
            told = "; ".join(f"{worker} {how}" for worker, how in sorted(wrong.items()))
            raise RemoteError(f"{self.name}: {told}. RPC has been stopped here; look at the output of that worker.")

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._lifeline is not None:
            self._lifeline.fail(f"{type(error).__name__}: {error}")
        self.shutdown(graceful=error is None)


def init(
    name: str,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    interface: str | None = None,
    trusted_network: bool = False,
    store: dist.Store | None = None,
    options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> Session:
    """Start torch's RPC as worker `name`, listening on one interface only; loopback by default.

    `rank` and `world_size` default to RANK and WORLD_SIZE. Workers meet at MASTER_ADDR:MASTER_PORT,
    where rank 0 listens, or in `store`. `interface` is a name or an IPv4 address of this host. Workers
    on more than one host need `trusted_network=True` on every rank, which says that everybody who can
    reach the ports may run code as this user: RPC has no authentication.

    Raises ConfigError, on every rank where the mistake is one of agreement, before RPC starts; RemoteError, naming its rank,
    if a worker does not come within the time limit of the store, or ends before RPC has started everywhere.
    """
    # Not public, but the only trace of sessions that were started past us.
    if rpc._init_counter:
        raise ConfigError(
            f"{name}: RPC was started before in this process, and RRefs stay bound to its first session. "
            "Start it once a process."
        )
    for what, given, kind in (("store", store, dist.Store), ("options", options, rpc.TensorPipeRpcBackendOptions)):
        if given is not None and not isinstance(given, kind):
            raise ArgumentTypeError(f"{what} must be a torch.distributed {kind.__name__}, or None, got {given!r:.80}.")
    own = find_interface(interface)
    rank, world_size = _number("rank", rank, "RANK"), _number("world_size", world_size, "WORLD_SIZE")
    options = options or rpc.TensorPipeRpcBackendOptions(_transports=_TRANSPORTS)
    if options.init_method != "env://":
        raise ConfigError(
            f"options.init_method is {options.init_method!r}: torch would make a store that listens on every "
            "interface. Leave it alone and set MASTER_ADDR and MASTER_PORT, or pass store=."
        )
    with _LOCK:
        before = listening()
        session = Session(name, own)
        try:
            if store is None:
                store = _make_store(session, rank, world_size, options.rpc_timeout)
            everyone = _meet(session, store, (rank, world_size), trusted_network, options)
            session._lifeline = Lifeline(store, rank, everyone)
        except BaseException:
            session._stop_listening()
            raise
        elsewhere = {address for address, _ in listening() - before} - {own.address}
    if elsewhere:
        session.shutdown(graceful=False)
        raise ConfigError(
            f"{name}: RPC listens on {sorted(elsewhere)}, not only on {own.address}; it was stopped. "
            "TensorPipe keeps the address it was first given: start it in a fresh process."
        )
    return session


def _start(
    session: Session, store: dist.Store, rank: int, world_size: int, options: rpc.TensorPipeRpcBackendOptions
) -> None:
    _MEETING.append(store)
    options.init_method = f"{_SCHEME}://"
    try:
        with warnings.catch_warnings():
            # Torch warns of the way in which its own RPC makes a gloo group.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            rpc.init_rpc(session.name, rank=rank, world_size=world_size, rpc_backend_options=options)
    except RuntimeError as error:
        raise RemoteError(f"{session.name} (rank {rank} of {world_size}): RPC did not start: {error}") from error
    finally:
        options.init_method = "env://"
        _MEETING.clear()


def _hand_over(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    yield _MEETING.pop(), -1, -1


register_rendezvous_handler(_SCHEME, _hand_over)


def _make_store(session: Session, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    own = session.interface
    host = os.environ.get("MASTER_ADDR", own.address if own.is_loopback else "")
    if not host:
        raise ConfigError("MASTER_ADDR is not set: it must be rank 0's address on the interface you named.")
    address, port = resolve(host), _number("MASTER_PORT", None, "MASTER_PORT")
    timeout = datetime.timedelta(seconds=timeout_s or 1800)
    if own.is_loopback and not address.startswith("127."):
        raise ConfigError(
            f"MASTER_ADDR {host} is {address}, and RPC listens on loopback only. For workers on several "
            "hosts name the interface that leads to them and pass trusted_network=True."
        )
    # torchrun's agent serves MASTER_PORT itself, and every rank is a client of it.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"{_SCHEME}/{attempt}", dist.TCPStore(address, port, world_size, False, timeout))
    if rank != 0:
        return dist.TCPStore(address, port, world_size, False, timeout)
    if not own.is_loopback and address != own.address:
        raise ConfigError(f"MASTER_ADDR {host} is {address}, where the others look; rank 0 listens on {own.address}.")
    listener = listen_on(own.address, port)
    session._listener = listener.dup()
    return dist.TCPStore(
        own.address,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _meet(
    session: Session,
    store: dist.Store,
    place: tuple[int, int],
    trusted_network: bool,
    options: rpc.TensorPipeRpcBackendOptions,
) -> list[dict[str, Any]]:
    """Let every rank know every other, then start RPC with them; raise on all ranks what they do not agree on."""
    rank, world_size = place
    # Stores may be used for several sessions in turn, and all ranks take part in each.
    turn = f"{_SCHEME}/{store.add(f'{_SCHEME}/turn/{rank}', 1)}"
    mine = {"name": session.name, "network": network_identity(), "trusted": trusted_network, **identity()}
    store.set(f"{turn}/{rank}", json.dumps(mine))
    limit: datetime.timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    serves = rank == 0 and is_tcp(store) and not launcher_serves_store()
    meeting = dist.PrefixStore(turn, own_connection(store))
    arrivals = Arrivals(meeting, (rank, range(world_size)), limit.total_seconds(), serves=serves)
    try:
        arrivals.wait()
        everyone = [json.loads(store.get(f"{turn}/{other}")) for other in range(world_size)]
        disagreement = _disagreement(everyone)
        if disagreement is not None:
            # Nobody misses those who end by it. But rank 0 takes the store with it, and the others still have to read why.
            arrivals.met()
            arrivals.conclude()
            raise disagreement
        own = session.interface.name
        with _environment(TP_SOCKET_IFNAME=own, GLOO_SOCKET_IFNAME=own):
            # By a thread that can be left behind: a worker that ends now would be waited for in C++, for half an hour.
            interruptible(lambda: _start(session, store, rank, world_size, options), arrivals)
    except RuntimeError as error:
        found = error if isinstance(error, CommunicationError) else arrivals.last_look()
        if found is None:
            raise
        arrivals.conclude()
        raise RemoteError(f"{session.name}: {found}") from error
    arrivals.met()
    return everyone


def _disagreement(everyone: list[dict[str, Any]]) -> ConfigError | None:
    names = [other["name"] for other in everyone]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return ConfigError(f"several ranks are called {', '.join(twice)}; every worker needs its own name.")
    networks = {other["network"] for other in everyone}
    doubtful = [other["name"] for other in everyone if not other["trusted"]]
    if len(networks) > 1 and doubtful:
        return ConfigError(
            f"the {len(everyone)} workers are on {len(networks)} hosts, and {', '.join(doubtful)} did not say "
            "trusted_network=True. RPC has no authentication: say it only where nobody else reaches the ports."
        )
    return None


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    saved = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _number(what: str, given: int | None, variable: str) -> int:
    if given is None:
        text = os.environ.get(variable)
        if text is None or not text.isdecimal():
            raise ConfigError(f"{what} was not given and {variable} is {text!r}; expected a number.")
        return int(text)
    if not isinstance(given, int) or isinstance(given, bool):
        raise ArgumentTypeError(f"{what} is a {type(given).__name__}; expected an int.")
    return given
