"""From a store to an engine: the ranks of a group meet, and find out how they can talk."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..hierarchical.engine import HierarchicalEngine
from ..hierarchical.hosts import host_identity, teams_of
from .engine import Engine, TeamEngine
from .meeting import Meeting
from .memory import process_memory
from .team import Board, Team


def assemble(
    store: dist.Store, rank: int, world: int, names: Sequence[int], timeout: timedelta
) -> Engine:
    """The engine of a group; every rank of it calls this. `names` are the ranks as messages call them."""
    meeting = Meeting(store, rank, world, timeout)
    try:
        teams = teams_of(meeting.announce(host_identity()))
        members = next(team for team in teams if rank in team)
        board, memory = Board(), process_memory()
        links = meeting.meet(members, board.arena, memory)
    finally:
        meeting.close()
    for peer, link in links.items():
        link.name = names[peer]
    by_name = {names[peer]: link for peer, link in links.items()}
    team = TeamEngine(Team(names[rank], [names[member] for member in members], by_name, board, memory))
    if len(teams) == 1:
        return team
    try:
        return HierarchicalEngine(team, teams, rank, names, store, timeout)
    except BaseException:
        team.close()
        raise
