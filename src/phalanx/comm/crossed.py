"""Whether ranks that come together on a group mean the same one, of several that they have in common.

Ranks that wrap or optimize on different groups wait for each other, each in its own group, until the time limits of both.

    same members    the n-th time that ranks of these members come together must be on one group. Whoever comes first
                    writes its name into the store of the world; who comes to another one refuses
    other members   who comes writes that it did, and looks whether somebody whom it needs here is where this rank would
                    have to come first: that one waits for this rank there, and this rank would wait for it here

Whoever finds it out refuses on both groups, so that nobody waits. Both write before they look, so one of them finds it.
Costs two questions to the store, and one per other group, when something is made. Must not know what is made.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..errors import MismatchError
from .collectives import Collectives
from .failure.answering import AnsweringStore
from .failure.board import board_of
from .torch_backend import collectives_for

# Of a world: how often ranks have come together, by their members. Another world has another store, and counts anew.
_num_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def refuse_crossed(collectives: Collectives, occasion: str) -> None:
    """Raise MismatchError if another rank has come to `occasion` on another group that needs this rank, too.

    Every rank of the group calls it, before it waits for the others there. Of two that differ, who comes later raises, and
    the other ranks are told by their groups.
    """
    world, mine = dist.group.WORLD, _names().get(collectives.group)
    if world is None or mine is None or collectives.world == 1 or not collectives.board.reaches_others:
        return
    meetings, members, own = _num_meetings.setdefault(world, Counter()), collectives.ranks.numbers, collectives.ranks.own
    here = _key(members, meetings[members])
    meetings[members] += 1
    store = board_of(world).store_for("meetings")
    first = said = f"{mine}; {own}"
    elsewhere = None
    # A store that is gone, or silent, is noticed where the ranks wait, which is next.
    with contextlib.suppress(RuntimeError, OSError):
        first = store.compare_set(here, "", said).decode()
        store.set(f"{here}/{own}", mine)
        elsewhere = _met_elsewhere(store, members, own, meetings)
    theirs, _, rank = first.rpartition("; ")
    if theirs == mine and elsewhere is not None:
        theirs, rank = elsewhere
    if theirs != mine:
        error = MismatchError(
            f"{collectives.me}: the ranks differ in the process group for {occasion}: {mine} on rank {own}, {theirs} on "
            f"rank {rank}. Give every rank the same process_group, and make groups in the same order."
        )
        # Some wait in one of the groups, some in the other.
        for group in [group for group, name in _names().items() if name in (mine, theirs)]:
            collectives_for(group).refuse(error)
        raise error


def _met_elsewhere(
    store: AnsweringStore, members: Sequence[int], own: int, meetings: Mapping[tuple[int, ...], int]
) -> tuple[str, str] | None:
    """A group of other members in which one of `members` waits for this rank, and who does."""
    for others in {tuple(dist.get_process_group_ranks(group)) for group in _names()} - {tuple(members)}:
        there = _key(others, meetings[others])  # the next meeting of theirs to which this rank will come
        if store.check([there]):
            for rank in sorted({*others} & {*members} - {own}):
                if store.check([f"{there}/{rank}"]):
                    return store.get(f"{there}/{rank}").decode(), str(rank)
    return None


def _key(members: Sequence[int], number: int) -> str:
    return f"{'-'.join(map(str, members))}/{number}"


def _names() -> dict[dist.ProcessGroup, str]:
    """The groups that torch.distributed has made, each by a name that it has on all ranks."""
    # Private, but there is no other way from a name to its group (tests/comm/test_crossed.py would notice). The world's
    # own name is the number of groups that a process has made before it, and may differ.
    world = dist.group.WORLD
    return {
        group: "the default group" if group is world else f"the group {name!r}"
        for group, name in c10d._world.pg_names.items()
    }
