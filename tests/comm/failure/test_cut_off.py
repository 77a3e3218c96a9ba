"""On gloo, a rank that ends before it has said anything to phalanx is named all the same, long before the time limit."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

import phalanx
from phalanx.comm.torch_backend import collectives_for
from phalanx.errors import PeerFailure
from tests.cluster import run_ranks, spawn_ranks

SOON_S = 20


def _wraps(rank: int, world: int) -> tuple[str, tuple[int, ...], float]:
    """The group is the script's own; rank 1 ends before it wraps."""
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        phalanx.DistributedDataParallel(torch.nn.Linear(2, 2))
    except PeerFailure as error:
        return str(error), error.ranks, time.monotonic() - started
    return "nothing", (), 0.0


def test_a_rank_that_ends_between_torchs_init_and_the_wrapper_is_named() -> None:
    outcomes = spawn_ranks(3, _wraps, pg_timeout_s=90, timeout_s=80)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].exitcode == 0, outcomes[rank].error_text
        text, ranks, seconds = outcomes[rank].value
        assert text.startswith(f"rank {rank}: ") and ranks == (1,) and seconds < SOON_S, text


def _asks(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    collectives = collectives_for(dist.group.WORLD)
    dist.barrier()
    for _ in range(200):
        assert not any(collectives.board.is_cut_off(place) for place in range(world) if place != rank)
    ones = torch.ones(70_000)
    dist.all_reduce(ones)
    assert ones.eq(world).all()
    dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.empty(3), 0)
    dist.barrier()


def test_asking_leaves_the_group_as_it_was() -> None:
    run_ranks(2, _asks)
