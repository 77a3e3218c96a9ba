"""From a store to a working group: its ranks meet, and find out which of them share memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..hierarchical.hosts import host_identity, teams_of
from ..hierarchical.operations import HierarchicalOperations
from ..memory.segment import process_memory
from ..shm.ops.operations import HostOperations, Operations
from ..shm.transport.rendezvous import Rendezvous
from ..shm.transport.team import ControlBlock, Team


def connect(
    store: dist.Store, rank: int, global_ranks: Sequence[int], timeout: timedelta
) -> Operations:
    """The operations of a group; every rank of it calls this. `global_ranks` is how messages name its ranks."""
    rendezvous = Rendezvous(store, rank, global_ranks, timeout)
    try:
        teams = teams_of(rendezvous.announce(host_identity()))
        members = next(team for team in teams if rank in team)
        # Before the ranks meet: whoever is linked to may look into this rank's control block at once.
        control, memory = ControlBlock(), process_memory()
        links = rendezvous.meet(members, control.arena, memory)
    finally:
        rendezvous.close()
    # Ranks meet by their numbers in the group; errors name them as users know them.
    for peer, link in links.items():
        link.peer = global_ranks[peer]
    by_rank = {global_ranks[peer]: link for peer, link in links.items()}
    team = Team(global_ranks[rank], [global_ranks[member] for member in members], by_rank, control, memory)
    local = HostOperations(team)
    if len(teams) == 1:
        return local
    # The leads connect to each other in here, which fails if a host does not come.
    try:
        return HierarchicalOperations(local, teams, rank, global_ranks, store, timeout)
    except BaseException:
        local.close()
        raise
