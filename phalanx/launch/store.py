"""The store of a run on one host: where its ranks meet, without a socket that anybody else could reach.

torch's TCPStore listens on every interface and asks nobody who they are. A run on one host needs no network for
its store: the launcher makes a file in memory, without a name in any folder, and the workers open it as a c10d
FileStore through the launcher's entry in `/proc`. The kernel lets only the launcher's own user (and root) follow
that entry, and the file is gone with the last process that holds it, however the run ends.

The launcher's side is `RunStore`. The worker's side is `answer_env_rendezvous`: a script asks torch for `env://`,
which is what `init_process_group` does by default, and gets this store. Owns both; knows nothing of hosts.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from phalanx.errors import ConfigError
from phalanx.launch.environment import LOOPBACK

RUN_STORE = "PHALANX_RUN_STORE"
"""Environment variable: the path of the run's store. Useless to whoever may not look into the launcher."""

_joined: Counter[int] = Counter()  # by the size of the world

_NOBODY_CLEANS_UP = -1  # FileStore would remove the file after as many workers; ours has no name to remove


class RunStore:
    """One store per start of the workers: what ranks of an earlier attempt wrote must not be read by the next."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def renew(self) -> str:
        """An empty store, whose path is returned for the workers' environment. The one before is dropped."""
        self.close()
        self._descriptor = os.memfd_create("phalanx-store", os.MFD_CLOEXEC)
        # Following the entry in /proc is refused to other users already; the mode refuses them a second time.
        os.fchmod(self._descriptor, 0o600)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Drop the store. Workers that hold it open keep it; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


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
    store = dist.FileStore(path, _NOBODY_CLEANS_UP)
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def answer_env_rendezvous(environ: Mapping[str, str]) -> None:
    """From now on `env://`, and `tcp://` at the run's own MASTER_ADDR:MASTER_PORT, mean the run's store."""
    if not environ.get(RUN_STORE):
        return
    # The registry is private: the public `register_rendezvous_handler` refuses to replace the two that torch
    # brings, and a script that asks for "env://" cannot be asked to ask for something else.
    # Imported by name, since `torch.distributed.rendezvous` is also the name of a function.
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    own = (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))
    elsewhere = handlers["tcp"]

    def tcp(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        asked = urlparse(url)
        ours = (asked.hostname, str(asked.port)) == own
        yield from _join(url, **options) if ours else elsewhere(url, **options)

    handlers["env"], handlers["tcp"] = _join, tcp


def _join(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    query = parse_qs(urlparse(url).query)
    place = []
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        value = query[name][0] if name in query else os.environ.get(variable)
        if value is None:
            raise ConfigError(f"neither {url} nor the environment says {variable}, which phalanx run sets")
        place.append(int(value))
    store = run_store(os.environ, timeout)
    if store is None:
        raise ConfigError(f"{RUN_STORE} was taken out of the environment; phalanx run sets it for its workers")
    # Groups of the same name that follow each other, as after `destroy_process_group`, must not read each other's
    # keys. Every rank of a world joins it equally often, so that each knows the number without asking.
    _joined[place[1]] += 1
    yield dist.PrefixStore(f"{place[1]}/{_joined[place[1]]}", store), place[0], place[1]
    raise RuntimeError(f"{url}: a process can meet the others once per start")
