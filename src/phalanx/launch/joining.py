"""A worker joins its world: it opens the store, waits until every rank has come, and makes the group with them.

Owns that order, for worlds whose ranks stay the same (`elastic.group` has it for the others). A rank that ends before the
group is there is named by everybody who waits for it, as far as this host can see: `comm.failure.arrivals`, `records.ends`.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from phalanx.comm.failure.arrivals import Arrivals
from phalanx.comm.failure.board import launcher_serves_store
from phalanx.comm.failure.interruption import interruptible
from phalanx.comm.failure.waiter import say
from phalanx.comm.failure.waiting import Waiting
from phalanx.errors import CommunicationError, PeerFailure
from phalanx.launch.environment import Environment
from phalanx.launch.records.ends import ends_known_to
from phalanx.launch.variables import AGENT_PID, RUN_STORE

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2  # between two attempts to reach the store


def join(environment: Environment, backend: str, timeout: timedelta | None, on_cpu: bool) -> None:
    """Make the default group with the other ranks of `environment`. Raises PeerFailure or CollectiveTimeout."""
    limit = dist.default_pg_timeout if timeout is None else timeout
    rank, world = environment.rank, environment.world
    serves = rank == 0 and not launcher_serves_store() and not os.environ.get(RUN_STORE)
    try:
        store = _open(environment, limit, serves)
        # By a connection of its own: a store that waits for a key, as gloo has it do, answers nobody else meanwhile.
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        own = dist.PrefixStore("joining", connection)
        arrivals = Arrivals(own, (rank, range(world)), limit.total_seconds(), ends_known_to(os.environ), serves)
        arrivals.wait()
    except CommunicationError:
        raise
    except (RuntimeError, TimeoutError) as error:
        if serves:
            raise  # it is the one who could not serve
        raise _without_store(environment, error) from error

    def make() -> None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)

    try:
        # By a thread, which is left behind if a rank ends now: gloo connects in one C++ call. Not on a device, of which a
        # thread has a current one of its own.
        interruptible(make, arrivals) if on_cpu else make()
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            arrivals.conclude()
            raise
        raise _explained(environment, arrivals, error) from error
    arrivals.met()


def _open(environment: Environment, limit: timedelta, serves: bool) -> dist.Store:
    if os.environ.get(RUN_STORE):
        met: tuple[dist.Store, int, int] = next(
            dist.rendezvous("env://", environment.rank, environment.world, timeout=limit)
        )
        return met[0]
    host, port = environment.host, environment.port
    assert host is not None and port is not None, "a process started alone joins nobody"
    if not serves and not launcher_serves_store():
        _wait_for_server(environment.rank, (host, port), limit.total_seconds())
    # Without waiting for the workers: that would be done in C++, where nobody looks who is still there.
    store = dist.TCPStore(
        host, port, None, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=serves
    )
    # Worlds that follow each other in one store must not read each other's keys. Every rank joins equally often, counted in
    # the store: another one at the same port, in the life of this process, begins anew. Our launcher has a new store for
    # each start of the workers, and counts starts per host; torchrun keeps its store, and workers may die before they join.
    start = "0" if AGENT_PID in os.environ else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"phalanx/joined/{start}/{environment.rank}", 1)
    return dist.PrefixStore(f"phalanx/world/{start}/{number}", store)


def _wait_for_server(rank: int, address: tuple[str, int], limit_s: float) -> None:
    """Return when somebody listens there, or at the time limit.

    c10d waits for that too, but with a warning on stderr for every attempt, for longer than it was told to, and without
    saying for whom.
    """
    waiting, pause_s = Waiting(say), _FIRST_PAUSE_S
    while waiting.seconds < limit_s:
        try:
            with socket.create_connection(address, timeout=max(limit_s - waiting.seconds, _FIRST_PAUSE_S)):
                return
        except OSError:
            waiting.look(lambda: f"rank {rank} waits for rank 0, which serves the store at {address[0]}:{address[1]}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise TimeoutError(f"nobody listens there after {limit_s:g} s")


def _explained(environment: Environment, arrivals: Arrivals, error: RuntimeError) -> RuntimeError:
    """What to raise for a group that could not be made: it names who has ended meanwhile, if somebody has."""
    found = arrivals.last_look()
    if found is not None:
        arrivals.conclude()
        return found
    lost = environment.rank != 0 and (isinstance(error, dist.DistNetworkError) or not arrivals.store_answers)
    return _without_store(environment, error) if lost else error


def _without_store(environment: Environment, error: Exception) -> PeerFailure:
    # A rank that joined and died at once has said nothing yet, and torch's error names nobody.
    return PeerFailure(
        f"rank {environment.rank}: the store at {environment.host}:{environment.port} cannot be reached, or was lost "
        "while the group was made. Where no launcher serves it, rank 0 does, and has not started or has ended. Look at "
        f"its log. ({error})",
        [0],
    )
