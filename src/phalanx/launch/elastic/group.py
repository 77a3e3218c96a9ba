"""A worker makes the process group of its generation, with those who may die while it is made.

Owns the order: a store that can be interrupted, a meeting of all ranks in it, the group. gloo connects its ranks in one C++
call that waits for a dead one for as long as it likes, whatever the time limit; so the group is made by a thread, which is
left behind if the generation ends meanwhile. Must not know what trains on the group.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.comm.failure.interruption import InterruptibleStore, Interruption, interruptible
from phalanx.comm.failure.log_store import LogStore
from phalanx.launch.store import open_store

_SEVERAL_HOSTS = "tcp://"


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
    limit = dist.default_pg_timeout if timeout_s is None else timedelta(seconds=timeout_s)
    store = _open(device, path, interruption, limit)
    keys = [f"phalanx/here/{each}" for each in range(world)]
    store.set(keys[rank], "1")
    # Before anybody connects: one that never came costs no thread.
    store.wait(keys, limit)
    # An attempt that was interrupted in here has been counted, and c10d puts the count into the keys of the store: ranks
    # that have failed more often than others would never find them again. Private; tests/elastic/test_group.py would notice.
    dist.distributed_c10d._world.group_count = 0

    def make() -> None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)

    interruptible(make, interruption)
    return store


def _open(device: torch.device, path: str, interruption: Interruption, limit: timedelta) -> dist.Store:
    if path.startswith(_SEVERAL_HOSTS):
        host, _, port = path.removeprefix(_SEVERAL_HOSTS).rpartition(":")
        where, opened = (host.strip("[]"), int(port)), []

        def connect() -> None:
            opened.append(dist.TCPStore(*where, is_master=False, timeout=limit, wait_for_workers=False))

        # One C++ call that looks for the launcher's store until the time limit, though its generation may be over.
        interruptible(connect, interruption)
        return opened[0] if device.type != "cpu" else InterruptibleStore(opened[0], interruption)
    # A device's own backend uses the store from threads of its own, also while the interpreter ends: those must not need
    # Python. There, a rank that waits for one that is lost waits for the time limit.
    if device.type != "cpu":
        return open_store(path)
    return InterruptibleStore(LogStore(path, interruption), interruption)
