"""Whether ranks that come together on a group mean the same one, of several with the same members.

Ranks that wrap or optimize on different groups of the same members wait for each other, each in its own group, until the
time limits of both. The n-th time that ranks of these members come together must be on one group, though. Whoever comes
first writes its name into the store of the world; who comes to another one refuses on both, so that nobody waits.

Costs one question to the store, when something is made. Must not know what is made.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..errors import MismatchError
from .collectives import Collectives
from .failure.board import board_of
from .torch_backend import collectives_for

# Of a world: how often ranks have come together, by their members. Another world has another store, and counts anew.
_num_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def refuse_crossed(collectives: Collectives, occasion: str) -> None:
    """Raise MismatchError if another rank has come to `occasion` on another group of the same members.

    Every rank of the group calls it, before it waits for the others there. Of two that differ, who comes later raises, and
    the other one is told by its group.
    """
    world, mine = dist.group.WORLD, _names().get(collectives.group)
    if world is None or mine is None or collectives.world == 1 or not collectives.board.reaches_others:
        return
    members = collectives.ranks.numbers
    number = _num_meetings.setdefault(world, Counter())[members]
    _num_meetings[world][members] += 1
    store = board_of(world).store_for("meetings")
    first = said = f"{mine}; {collectives.ranks.own}"
    # A store that is gone, or silent, is noticed where the ranks wait, which is next.
    with contextlib.suppress(RuntimeError, OSError):
        first = store.compare_set(f"{'-'.join(map(str, members))}/{number}", "", said).decode()
    theirs, _, rank = first.rpartition("; ")
    if theirs != mine:
        error = MismatchError(
            f"{collectives.me}: the ranks differ in the process group for {occasion}: {mine} on rank "
            f"{collectives.ranks.own}, {theirs} on rank {rank}. Give every rank the same process_group, and make groups in "
            "the same order."
        )
        # Some wait in one of the groups, some in the other.
        for group in [group for group, name in _names().items() if name in (mine, theirs)]:
            collectives_for(group).refuse(error)
        raise error


def _names() -> dict[dist.ProcessGroup, str]:
    """The groups that torch.distributed has made, each by a name that it has on all ranks."""
    # Private, but there is no other way from a name to its group (tests/comm/test_crossed.py would notice). The world's
    # own name is the number of groups that a process has made before it, and may differ.
    world = dist.group.WORLD
    return {
        group: "the default group" if group is world else f"the group {name!r}"
        for group, name in c10d._world.pg_names.items()
    }
