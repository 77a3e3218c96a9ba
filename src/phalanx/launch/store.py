"""The store of a run on one host: where its ranks meet, without a socket that anybody else could reach.

torch's TCPStore listens on every interface and asks nobody who they are. A run on one host needs no network for
its store: the launcher makes a file in memory, without a name in any folder, and the workers open it as a c10d
FileStore through the launcher's entry in `/proc`. The kernel lets only the launcher's own user (and root) follow
that entry, and the file is gone with the last process that holds it, however the run ends.

The launcher's side is `RunStore`. The worker's side is `answer_env_rendezvous`: a script asks torch for `env://`,
which is what `init_process_group` does by default, and gets this store. Owns both; knows nothing of hosts.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlparse

from phalanx.errors import ConfigError
from phalanx.launch.environment import LOOPBACK
from phalanx.launch.variables import RUN_STORE

if TYPE_CHECKING:
    import torch.distributed as dist

_NOBODY_CLEANS_UP = -1  # FileStore would remove the file after as many workers; ours has no name to remove


class RunStore:
    """One store per start of the workers: what ranks of an earlier attempt wrote must not be read by the next."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def renew(self) -> str:
        """An empty store, whose path is returned for the workers' environment. The one before is dropped."""
        self.close()
        self._descriptor = _with_number_of_its_own(os.memfd_create("phalanx-store", os.MFD_CLOEXEC))
        # Following the entry in /proc is refused to other users already; the mode refuses them a second time.
        os.fchmod(self._descriptor, 0o600)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def was_used(self) -> bool:
        """Whether a worker has written anything to it: whoever makes a process group does."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > 0

    def close(self) -> None:
        """Drop the store. Workers that hold it open keep it; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_numbers = itertools.count()
_MOST_NUMBERS = 1 << 14


def _with_number_of_its_own(descriptor: int) -> int:
    """The same file under a number that no other file of this process gets soon after it is closed. Takes the descriptor.

    A FileStore writes to its path once more when it is destroyed, which is whenever Python's collector finds it. By then
    the launcher may have closed the file: that is harmless as long as nothing else has the path. Numbers as the kernel gives
    them come again at once, and a store that writes into another file, or waits for one that is none, takes its process
    with it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_NUMBERS if soft == resource.RLIM_INFINITY else min(soft, _MOST_NUMBERS)
    lowest = most // 2  # ordinary files have the lowest numbers that are free
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest + next(_numbers) % max(1, most - lowest - 16))
    finally:
        os.close(descriptor)


class ReservedPort:
    """A port of loopback for MASTER_PORT, kept from other programs while the run lives.

    Nothing listens there. It is for scripts that make a store of their own from MASTER_ADDR and MASTER_PORT: both
    sockets allow reuse, so that the script may listen while this one, which does not listen, is still bound.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()


def open_store(path: str) -> dist.Store:
    """The store that a launcher keeps at `path`."""
    # Here, and not above: the launcher uses the other half of this module, and has no torch.
    import torch.distributed as dist

    return dist.FileStore(path, _NOBODY_CLEANS_UP)


def run_store(environ: Mapping[str, str], timeout: timedelta | None = None) -> dist.Store | None:
    """The store of the run that started this process, or None when it was not `phalanx run` on one host."""
    path = environ.get(RUN_STORE)
    if not path:
        return None
    if not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(
            f"rank {environ.get('RANK', '?')}: the store of this run, {path}, cannot be opened. The launcher has ended, "
            "or this process changed its user or its process namespace before it joined; join first."
        )
    store = open_store(path)
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def answer_env_rendezvous(environ: Mapping[str, str]) -> None:
    """From now on `env://` and `tcp://` lead to the run's store, where they mean the world that this run started.

    That is at the run's own MASTER_ADDR:MASTER_PORT, and at any other port of loopback that all ranks of the run meet at,
    as in scripts that set the two variables themselves. Everything else is left to torch.
    """
    if not environ.get(RUN_STORE):
        return
    # The registry is private: the public `register_rendezvous_handler` refuses to replace the two that torch
    # brings, and a script that asks for "env://" cannot be asked to ask for something else.
    # Imported by name, since `torch.distributed.rendezvous` is also the name of a function.
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    ours = _Point(environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"), int(environ.get("WORLD_SIZE", 0)))
    for scheme in ("env", "tcp"):
        handlers[scheme] = _answer(ours, handlers[scheme])


class _Point(NamedTuple):
    """Where a world of some size meets."""

    host: str | None
    port: str | None
    world: int

    def is_within(self, run: _Point) -> bool:
        at_home = self.host == "localhost" or (self.host or "").startswith("127.") or self.host == "::1"
        return self[:2] == run[:2] or (at_home and self.world == run.world)


def _answer(run: _Point, torchs: Callable[..., Any]) -> Callable[..., Iterator[tuple[dist.Store, int, int]]]:
    import torch.distributed as dist

    from phalanx.comm.failure.arrivals import Arrivals
    from phalanx.launch.records.ends import ends_known_to

    def handler(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        asked = urlparse(url)
        query = parse_qs(asked.query)
        rank = query["rank"][0] if "rank" in query else os.environ.get("RANK")
        world = query["world_size"][0] if "world_size" in query else os.environ.get("WORLD_SIZE")
        host = asked.hostname if asked.scheme == "tcp" else os.environ.get("MASTER_ADDR")
        port = str(asked.port) if asked.scheme == "tcp" else os.environ.get("MASTER_PORT")
        point = _Point(host, port, int(world or 0))
        store = run_store(os.environ, timeout) if rank and world and point.is_within(run) else None
        if rank is None or store is None:
            yield from torchs(url, **options, **({} if timeout is None else {"timeout": timeout}))
            return
        # Groups that follow each other at one place, as after `destroy_process_group`, must not read each other's
        # keys. Every rank of a world joins it equally often, so that each knows the number without asking.
        _joined[point] += 1
        ours = dist.PrefixStore(f"{host}:{port}/{world}/{_joined[point]}", store)
        if (rank, point.world) == (os.environ.get("RANK"), run.world):
            limit: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
            # Before anybody makes a group, which would wait for a rank that has ended until the time limit.
            arrivals = Arrivals(ours, (int(rank), range(run.world)), limit.total_seconds(), ends_known_to(os.environ))
            arrivals.wait()
            arrivals.met()  # what comes after is another's to watch
        yield ours, int(rank), point.world
        raise RuntimeError(f"{url}: a process can meet the others once per start")

    return handler


_joined: Counter[_Point] = Counter()
