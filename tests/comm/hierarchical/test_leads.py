"""Leads whose connection is cut at any moment of an exchange: each finishes, or raises soon."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.hierarchical.leads import Leads, LeadsError
from phalanx.comm.memory.scratch import Scratch
from phalanx.comm.memory.segment import process_memory
from phalanx.comm.shm.transport.call import ReduceOp
from tests.cluster import run_ranks

_LIMIT_S = 30.0
_HEARD_S = 0.05
_SOON_S = 10.0  # on a busy machine


def exchange_and_cut(rank: int, world: int, num_bytes: int, seeds: range) -> list[str]:
    """In many groups of leads, each cut by one of them at some moment: what became of the exchange, and that it was soon."""
    store = dist.distributed_c10d._get_default_store()
    outcomes = []
    for seed in seeds:
        chance = random.Random(seed)
        cutter, delay_s = chance.randrange(world), chance.random() * 0.01
        leads = Leads(
            dist.PrefixStore(f"leads/{seed}", store), rank, world, timedelta(seconds=_LIMIT_S), Scratch(process_memory())
        )
        leads.barrier(timedelta(seconds=_LIMIT_S))
        received = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(world)]
        given = [torch.full((num_bytes,), 1 + rank, dtype=torch.uint8)] * world
        # The others follow when they hear of it, as with a failure relay.
        cut = threading.Timer(delay_s if rank == cutter else delay_s + _HEARD_S, leads.cut)
        cut.start()
        began = time.monotonic()
        try:
            leads.exchange(received, given, timedelta(seconds=_LIMIT_S))
            outcomes.append("finished")
            assert all(bool((data == 1 + other).all()) for other, data in enumerate(received) if other != rank), seed
        except LeadsError:
            outcomes.append("raised")
        assert time.monotonic() - began < _SOON_S, f"seed {seed}: rank {rank} was left waiting"
        cut.join()
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(("world", "num_cuts"), [(2, 20), (3, 12)])
def test_nobody_is_left_waiting_when_a_connection_is_cut(world: int, num_cuts: int) -> None:
    outcomes = run_ranks(world, exchange_and_cut, 16_000_000, range(num_cuts), timeout_s=100)
    assert "raised" in outcomes[0], "no exchange was interrupted"


@pytest.mark.parametrize("world", [2, 3])
def test_sums_follow_each_other_without_mixing(world: int) -> None:
    run_ranks(world, reduce_again_and_again, [1, 2, 3, 1000, 70_001, 1_000_003])


def reduce_again_and_again(rank: int, world: int, sizes: list[int]) -> None:
    """One tensor, all-reduced and written anew at once: what is still on its way must not see that."""
    store = dist.PrefixStore("leads", dist.distributed_c10d._get_default_store())
    leads = Leads(store, rank, world, timedelta(seconds=_LIMIT_S), Scratch(process_memory()))
    for size in sizes:
        tensor = torch.empty(size)
        for turn in range(8):
            tensor.fill_(turn + rank)
            leads.all_reduce(tensor, ReduceOp.SUM, timedelta(seconds=_LIMIT_S))
            assert bool((tensor == sum(turn + other for other in range(world))).all()), (size, turn)
    dist.barrier()
    leads.cut()


def test_exchanges_of_all_sizes_arrive_whole() -> None:
    run_ranks(2, exchange_sizes, [0, 1, 511, 512, 513, 70_001, 5_000_000])


def exchange_sizes(rank: int, world: int, sizes: list[int]) -> None:
    store = dist.PrefixStore("leads", dist.distributed_c10d._get_default_store())
    leads = Leads(store, rank, world, timedelta(seconds=_LIMIT_S), Scratch(process_memory()))
    for size in sizes:
        for _ in range(3):
            received = [torch.zeros(size, dtype=torch.uint8) for _ in range(world)]
            leads.exchange(received, [torch.full((size,), 1 + rank, dtype=torch.uint8)] * world, timedelta(seconds=_LIMIT_S))
            assert all(bool((data == 1 + other).all()) for other, data in enumerate(received) if other != rank), size
    dist.barrier()
    leads.cut()
