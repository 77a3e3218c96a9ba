"""Whether the ranks that make a group together mean the same group.

c10d numbers groups by how many a rank has made, so that ranks which give other members, or make groups in another order,
meet under one name, and wait for each other until the time limit. Each rank therefore says first whom it expects.
Must not know how ranks are connected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import CollectiveTimeout, MismatchError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


def agree_on_members(store: dist.Store, me: int, members: Sequence[int], timeout: timedelta) -> None:
    """Return when every member has said that it expects the same ones. Raises MismatchError or CollectiveTimeout."""
    mine = list(members)
    store.set(_key(me), json.dumps(mine))
    deadline, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
    absent = [rank for rank in mine if rank != me]
    while True:
        for rank in [rank for rank in absent if store.check([_key(rank)])]:
            theirs = json.loads(store.get(_key(rank)))
            if theirs != mine:
                raise MismatchError(
                    f"rank {me}: the ranks make different process groups: of ranks {mine} on rank {me}, of ranks {theirs} "
                    f"on rank {rank}. Call new_group on every rank, with the same members in the same order."
                )
            absent.remove(rank)
        if not absent:
            return
        if time.monotonic() > deadline:
            raise CollectiveTimeout(
                f"rank {me}: rank {', '.join(map(str, absent))} did not come to make a process group of ranks {mine} within "
                f"{timeout.total_seconds():g} s. Call new_group on every rank, with the same members in the same order.",
                absent,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def forget_members(store: dist.Store, me: int) -> None:
    """The group is made, so that every member has read it: a later group of the same name must not."""
    store.delete_key(_key(me))


def _key(rank: int) -> str:
    return f"phalanx/members/{rank}"
