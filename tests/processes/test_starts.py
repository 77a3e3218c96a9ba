"""Processes below a rank: forked, spawned, data loaders; and what ranks that are such processes say at their end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.comm.failure import gloo_threads
from phalanx.launch.worker import leave
from tests.cluster import Leak, reserved_port, run_ranks, spawn_ranks
from tests.cluster.command import run_command
from tests.cluster.process import SEARCH_PATH

pytestmark = pytest.mark.timeout(100)

SOON_S = 20.0


class Numbers(Dataset[torch.Tensor]):
    """What a loader's workers read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


# -- children of a rank ------------------------------------------------------------------------


def _fork_and_go_on(rank: int, world: int) -> None:
    """The child's end must be no concern of the group's."""
    worker = phalanx.init(backend="phalanx")
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    child = os.fork()
    if child == 0:
        leave()
        os._exit(0 if dist.is_initialized() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child has left its parent's group"
    model(torch.ones(1, 3)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == worker.world


def test_a_forked_child_leaves_the_group_alone() -> None:
    for outcome in spawn_ranks(2, _fork_and_go_on, backend=None, timeout_s=60):
        assert outcome.exitcode == 0 and not outcome.timed_out, outcome


GARBAGE = """
import gc, os, time, torch, phalanx
import torch.distributed as dist
gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
dist.destroy_process_group()
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
for _ in range(100):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
raise SystemExit("the child waits for threads that it does not have")
"""


def test_a_forked_child_does_not_collect_groups_that_its_parent_has_destroyed() -> None:
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = run_command([sys.executable, "-c", GARBAGE], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _die_while_a_child_lives(rank: int, world: int) -> float:
    phalanx.init(backend="gloo")
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os._exit(7)
    with pytest.raises(RuntimeError):
        dist.barrier()
    return time.monotonic() - began


def test_the_end_of_a_rank_is_seen_though_a_child_of_it_lives_on() -> None:
    first, second = spawn_ranks(2, _die_while_a_child_lives, backend=None, timeout_s=60)
    assert (first.exitcode, second.exitcode) == (0, 7), (first, second)
    assert first.value < 7, "it has waited for the child"


def _fork_while_the_loop_is_at_work(rank: int, world: int) -> tuple[int, int]:
    """How many connections a child is freed of: with gloo's loop waiting, and with one that is seen at work first."""
    phalanx.init(backend="gloo")
    dist.barrier()
    waiting = gloo_threads._connections()
    threads, looks = gloo_threads._threads, 0

    def seen_at_work() -> Iterator[tuple[str, str, list[int]]]:
        nonlocal looks
        looks += 1
        yield from ((task, name, call if looks > 3 else []) for task, name, call in threads())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_threads, "_threads", seen_at_work)
        busy = gloo_threads._connections()
    dist.barrier()
    return len(waiting), len(busy)


def test_connections_are_found_while_their_loop_is_at_work() -> None:
    for outcome in spawn_ranks(2, _fork_while_the_loop_is_at_work, backend=None, timeout_s=60):
        assert outcome.exitcode == 0, outcome
        waiting, busy = outcome.value
        assert busy == waiting > 0


FORKING = """
import os, sys, time
import torch, phalanx
phalanx.init(backend="gloo")
phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))(torch.ones(1, 3)).sum().backward()
child = os.fork()
if child == 0:
    sys.exit(7)
began = time.monotonic()
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() - began < 15:
    time.sleep(0.05)
if ended == (0, 0):
    os.kill(child, 9)
print(ended[1] >> 8)
"""


def test_a_forked_child_that_ends_as_a_script_does_ends() -> None:
    """By a real interpreter's end, in which destructors run: gloo's wait for threads that the child does not have."""
    env = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = run_command([sys.executable, "-c", FORKING], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["7"], (done.stdout, done.stderr)


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


@pytest.mark.parametrize(
    "start",
    ["fork", pytest.param("forkserver", marks=pytest.mark.soak), pytest.param("spawn", marks=pytest.mark.thorough)],
)
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
