"""Processes below a rank: forked, spawned, data loaders; and what ranks that are such processes say at their end."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

import phalanx
from tests.cluster import Leak, reserved_port, run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(100)

SOON_S = 20.0


class Numbers(Dataset[torch.Tensor]):
    """What a loader's workers read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


# -- children of a rank ------------------------------------------------------------------------


def _child_that_exits(rank: int, world: int, backend: str) -> float:
    """A child forked by hand, which runs exit functions as any program does."""
    worker = phalanx.init(backend=backend)
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        # What a script's end runs. Not `sys.exit`, which here would end in the code around the test.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # Then modules are emptied, which destroys what nobody else holds.
        del model
        torch.distributed.distributed_c10d._world.__dict__.clear()
        torch.distributed.distributed_c10d._pg_map.clear()
        torch.distributed.group.WORLD = None
        gc.collect()
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() - began < SOON_S, "the child hangs at its exit"
        time.sleep(0.02)
    # And the parent is as before.
    model(torch.ones(1, 3)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == worker.world
    return time.monotonic() - began


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_forked_child_ends_by_itself_and_leaves_the_group_alone(backend: str) -> None:
    for outcome in spawn_ranks(2, _child_that_exits, backend, backend=None, timeout_s=60):
        assert outcome.exitcode == 0 and not outcome.timed_out, outcome


def _load(rank: int, world: int, start: str) -> None:
    phalanx.init(backend="phalanx")
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=start, persistent_workers=False)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    everyone = [torch.empty(2, 3) for _ in range(world)]
    dist.all_gather(everyone, model.module.weight.detach())
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.soak), "spawn"])
def test_data_loaders_of_every_start_method_work_beside_the_group(start: str) -> None:
    for outcome in spawn_ranks(2, _load, start, backend=None, timeout_s=80, check_shm=False):
        assert outcome.exitcode == 0 and not outcome.timed_out, outcome


# -- ranks that are children -------------------------------------------------------------------


def _rank_of_spawn(rank: int, world: int, port: int, backend: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    phalanx.init(backend=backend, timeout_s=60)
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        if rank == 1 and step == 1:
            raise ArithmeticError("rank 1 has its reasons")
        model(torch.ones(1, 3)).sum().backward()


def _parent(rank: int, world: int, port: int, backend: str, how: str) -> Any:
    began = time.monotonic()
    if how == "spawn":
        # Forked and not spawned, to save the import of torch; the function around the rank's is the same.
        with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
            torch.multiprocessing.start_processes(_rank_of_spawn, (2, port, backend), nprocs=2, start_method="fork")
        assert time.monotonic() - began < SOON_S
        return str(raised.value)
    import contextlib
    import io
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    children = [context.Process(target=_listened, args=(n, 2, port, backend, theirs)) for n in range(2)]
    with contextlib.redirect_stderr(io.StringIO()):
        for child in children:
            child.start()
    said = ours.recv()
    for child in children:
        child.join(SOON_S)
    assert [child.exitcode for child in children] == [1, 1]
    return said


def _listened(rank: int, world: int, port: int, backend: str, pipe: Any) -> None:
    try:
        _rank_of_spawn(rank, world, port, backend)
    except Exception as error:
        if rank == 0:
            pipe.send(str(error))
        raise


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("how", ["spawn", "process"])
def test_the_words_of_a_raising_rank_reach_the_parent_and_the_peers(backend: str, how: str) -> None:
    with reserved_port() as port:
        (said,) = run_ranks(1, _parent, port, backend, how, backend=None, allow_leaks=tuple(Leak))
    assert "rank 1 has its reasons" in said
