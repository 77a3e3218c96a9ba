"""A worker makes the process group of its generation, with those who may die while it is made.

Owns the order: a store that can be interrupted, a meeting of all ranks in it, the group. Must not know what trains on it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.comm.failure.interruption import InterruptibleStore, Interruption
from phalanx.comm.failure.log_store import LogStore
from phalanx.launch.store import open_store

# gloo connects to everybody in one call that nobody can interrupt. All ranks are about to make it then, so that a time limit
# tells as much: one of them has died in there, and the others meet again.
_CONNECTING = timedelta(seconds=5)


def make_group(
    backend: str,
    device: torch.device,
    place: tuple[int, int],
    path: str,
    interruption: Interruption,
    timeout_s: float | None,
) -> dist.Store:
    """Make the default group, as rank `place[0]` of `place[1]`. Returns its store, for the caller to hold while the group is
    used: c10d holds half of it only. Raises what `interruption` says as soon as some rank is known not to come."""
    rank, world = place
    store = _open(device, path, interruption)
    limit = dist.default_pg_timeout if timeout_s is None else timedelta(seconds=timeout_s)
    keys = [f"phalanx/here/{each}" for each in range(world)]
    store.set(keys[rank], "1")
    store.wait(keys, limit)
    # An attempt that was interrupted in here has been counted, and c10d puts the count into the keys of the store: ranks
    # that have failed more often than others would never find them again. Private; tests/elastic/test_group.py would notice.
    dist.distributed_c10d._world.group_count = 0
    brief = min(limit, _CONNECTING) if world > 1 else limit
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=brief)
    # Private, as is every call that does it; tests/elastic/program.py would notice if it moved.
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    return store


def _open(device: torch.device, path: str, interruption: Interruption) -> dist.Store:
    # A device's own backend uses the store from threads of its own, also while the interpreter ends: those must not need
    # Python. There, a rank that waits for one that is lost waits for the time limit.
    if device.type != "cpu":
        return open_store(path)
    return InterruptibleStore(LogStore(path, interruption), interruption)
