"""Who is at fault when a step of a team is not answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.comm.shm.transport.team import _PROGRESS, Team


def _stragglers(own: int, peers: dict[int, int], waited_for: int) -> list[int]:
    team: Any = Team.__new__(Team)
    team.watch = SimpleNamespace(links=[SimpleNamespace(peer=peer) for peer in peers])
    team._num_steps = own
    team._peer_pages = [(bytearray(_PROGRESS.pack(count)), 0) for count in peers.values()]
    found: list[int] = team._stragglers(waited_for)
    return found


@pytest.mark.parametrize(
    ("own", "peers", "waited_for", "named"),
    [
        (7, {1: 7, 2: 6}, 2, [2]),
        (7, {1: 6, 2: 5}, 1, [2]),  # the one waits for the other
        (7, {1: 6, 2: 6}, 1, [1, 2]),
        (7, {1: 7, 2: 7}, 2, [2]),  # it has counted, and has not signalled
        (7, {1: 7, 2: 8}, 2, [2]),  # it goes on just now, because rank 1 has given up and let it go
    ],
)
def test_who_keeps_a_step_waiting_is_named(own: int, peers: dict[int, int], waited_for: int, named: list[int]) -> None:
    assert _stragglers(own, peers, waited_for) == named
