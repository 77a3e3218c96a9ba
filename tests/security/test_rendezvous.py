"""The ranks of a host meet under abstract addresses, which every user of the host can read and connect to."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.comm.memory.segment import process_memory
from phalanx.comm.shm.transport.link import Link
from phalanx.comm.shm.transport.rendezvous import Rendezvous
from phalanx.comm.shm.transport.team import ControlBlock
from phalanx.errors import PeerFailure
from tests.security.intruder import NOBODY, needs_root

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ranks() -> Iterator[list[Rendezvous]]:
    """Two ranks, each of which has announced itself."""
    store = dist.HashStore()
    made = [Rendezvous(store, rank, [0, 1], timedelta(seconds=20)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.announce("host"), made))
    yield made
    for one in made:
        one.close()


def meet(one: Rendezvous) -> Link:
    (link,) = one.meet([0, 1], ControlBlock().arena, process_memory()).values()
    return link


def connect_as_nobody(address: str, count: int) -> tuple[int, int]:
    """A process of another user that connects as often, and says nothing; its id, and what keeps it alive."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        for stranger in strangers:
            stranger.setblocking(False)
            stranger.connect_ex(address)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    return child, writer


@needs_root
def test_another_user_who_fills_the_queue_does_not_end_the_rendezvous(ranks: list[Rendezvous]) -> None:
    child, alive = connect_as_nobody("\0" + ranks[0]._name, 8)
    time.sleep(0.3)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(lambda: (time.sleep(0.5), meet(ranks[0]))[1])
        links = [pool.submit(meet, ranks[1]).result(), late.result()]
    assert [link.peer for link in links] == [0, 1]
    for link in links:
        link.close()
    os.close(alive)
    os.waitpid(child, 0)


def test_a_rank_that_ends_before_it_has_read_is_named(ranks: list[Rendezvous]) -> None:
    threading.Timer(0.3, ranks[0].close).start()
    with pytest.raises(PeerFailure, match="rank 1: rank 0 ended before the ranks of this host had met") as caught:
        meet(ranks[1])
    assert list(caught.value.ranks) == [0]


def test_nothing_of_a_peer_is_inherited_by_the_programs_that_a_rank_starts(ranks: list[Rendezvous]) -> None:
    # By `os.system`, say: one that lives on would hold the group's memory, and one of another user could read it.
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(meet, ranks))
    for link in links:
        held = [link.connection.fileno(), link.inbox, link.outbox, link.control._fd, link.memory._fd]
        assert not any(map(os.get_inheritable, held)), list(map(os.get_inheritable, held))
        link.close()
