"""`phalanx.init()` in real processes, under the variables of each launcher."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import phalanx
from phalanx.comm.hierarchical import hosts
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch import worker as worker_module
from phalanx.launch.worker import TRACE_DIRECTORY, init, leave, threads_for
from phalanx.observe import trace
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

LAUNCHERS = {
    "environment": lambda rank, world: {"RANK": str(rank), "WORLD_SIZE": str(world)},
    "slurm": lambda rank, world: {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
    },
    "openmpi": lambda rank, world: {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
    },
    "mpich": lambda rank, world: {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(world),
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_launcher() -> dict[str, str]:
    """The pool's workers carry torchrun's variables."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ours}


def join_and_sum(rank: int, world: int, launcher: str, port: int) -> tuple[object, ...]:
    environ = without_launcher() | LAUNCHERS[launcher](rank, world) | {"MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, environ, clear=True), init() as worker:
        total = torch.full((3,), float(worker.rank + 1))
        dist.all_reduce(total)
        assert init() is worker
        return worker.launcher, worker.rank, worker.world, worker.is_first, total.tolist()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_call_joins_under_every_launcher(launcher: str) -> None:
    results = run_ranks(2, join_and_sum, launcher, free_port(), backend=None)
    assert results == [(launcher, rank, 2, rank == 0, [3.0, 3.0, 3.0]) for rank in range(2)]


def join_on_two_hosts(rank: int, world: int, port: int) -> tuple[object, ...]:
    """Two hosts of two ranks, played by this one."""
    environ = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    environ |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.object(hosts, "_pretended", f"host {rank // 2}"),
        mock.patch.dict(os.environ, without_launcher() | environ, clear=True),
        init() as worker,
    ):
        total = torch.full((3,), float(worker.rank + 1))
        dist.all_reduce(total)
        return worker.backend, total.tolist()


def test_hosts_with_several_ranks_get_the_backend_that_moves_less_between_them() -> None:
    assert run_ranks(4, join_on_two_hosts, free_port(), backend=None) == [("phalanx", [10.0] * 3)] * 4


def use_the_small_things(rank: int, world: int, port: int) -> tuple[object, ...]:
    environ = without_launcher() | LAUNCHERS["environment"](rank, world) | {"MASTER_PORT": str(port)}
    said = io.StringIO()
    with mock.patch.dict(os.environ, environ, clear=True), init() as worker, contextlib.redirect_stdout(said):
        worker.print("loss", 1.5)
        with worker.first_only() as mine:
            pass
        worker.barrier()
        batches = [batch.tolist() for batch in worker.loader(DataLoader(list(range(6)), 2))]
        return said.getvalue(), mine, worker.mean(float(rank), weight=rank), worker.gather(rank), batches


def test_a_worker_offers_what_every_script_writes() -> None:
    first, other = run_ranks(2, use_the_small_things, free_port(), backend=None)
    assert first == ("loss 1.5\n", True, 1.0, [0, 1], [[0, 1], [4]])
    assert other == ("", False, 1.0, [0, 1], [[2, 3], [5]])


def adopt(rank: int, world: int) -> tuple[object, ...]:
    with mock.patch.dict(os.environ, without_launcher(), clear=True):
        group = dist.group.WORLD
        with pytest.raises(ConfigError, match="on 'gloo' exists already, init was asked for 'mpi'"):
            init(backend="mpi")
        worker = init()
        with pytest.raises(ConfigError, match="called before with backend 'gloo', now with 'mpi'"):
            init(backend="mpi")
        return worker.rank, worker.world, worker.backend, worker.launcher, dist.group.WORLD is group


def test_a_group_made_by_the_script_is_kept() -> None:
    results = run_ranks(2, adopt, backend="gloo")
    assert results == [(rank, 2, "gloo", "process group", True) for rank in range(2)]


@pytest.fixture
def alone():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    yield
    leave()
    trace.stop()
    torch.set_num_threads(threads)


def test_a_process_alone_trains_as_a_world_of_one(alone: None) -> None:
    worker = init()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (worker.rank, worker.world, worker.launcher, tensor.tolist()) == (0, 1, "alone", [1.0, 1.0])
    assert "rank=0, world=1" in repr(worker)


def test_a_device_of_another_kind_is_refused_the_second_time(alone: None) -> None:
    init()
    with pytest.raises(ConfigError, match="device 'cpu', now with 'meta'"):
        init(device="meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "toaster"}, "no device 'toaster'"),
        ({"backend": 3}, "backend is the name of one"),
        ({"threads": "x"}, "threads is a number"),
        ({"timeout_s": float("nan")}, "timeout_s must be above 0"),
    ],
)
def test_a_wrong_argument_is_refused_the_second_time_too(options: dict[str, Any], message: str, alone: None) -> None:
    init()
    with pytest.raises(PhalanxError, match=message):
        init(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "carrier-pigeon"}, "torch knows no backend 'carrier-pigeon'; it has .*gloo"),
        ({"backend": "mpi"}, "comes without .mpi.. Leave the backend to phalanx.init"),
        ({"device": "toaster"}, "no device 'toaster'"),
        ({"device": "cuda"}, "needs GPU 0 of this host, which has 0"),
        ({"threads": 0}, "threads must be 1 or more, got 0"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_before_joining(options: dict[str, object], message: str) -> None:
    with mock.patch("torch.accelerator.device_count", return_value=0), pytest.raises(ConfigError, match=message):
        init(**options)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_tracing_follows_the_environment(alone: None, tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {TRACE_DIRECTORY: str(tmp_path)}):
        init()
    assert trace.recorder is not None and trace.recorder.directory == tmp_path


def test_cores_are_shared_between_the_ranks_of_a_host() -> None:
    with mock.patch("os.sched_getaffinity", return_value=set(range(8))):
        assert [threads_for(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


def test_threads_are_left_alone_when_the_environment_sets_them(alone: None) -> None:
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        init()
    assert torch.get_num_threads() == 1
    leave()
    with (
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": ""}),
        mock.patch("os.sched_getaffinity", return_value=set(range(3))),
    ):
        init()
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("kind", ["plain", "in backward", "in backward, clipped", "overlapped"])
def test_who_comes_later_does_not_train_alone(kind: str, alone: None) -> None:
    worker = init(backend="gloo")
    net = torch.nn.Linear(2, 2)
    if kind.startswith("in backward"):
        phalanx.optim.apply_in_backward(torch.optim.SGD, net.parameters(), lr=0.1, max_norm=1.0 if "," in kind else None)
    model = phalanx.DistributedDataParallel(net)
    optimizer: torch.optim.Optimizer | None = torch.optim.SGD(net.parameters(), lr=0.1) if kind == "plain" else None
    if kind == "overlapped":
        optimizer = phalanx.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    before = net.weight.detach().clone()
    worker.refuse_to_train_alone()
    try:
        with pytest.raises(ConfigError, match="started to join ranks that train already"):
            model(torch.ones(1, 2)).sum().backward()
            if optimizer is not None:
                optimizer.step()
    finally:
        assert worker._refusal is not None
        worker._refusal.remove()
    assert torch.equal(net.weight, before)


def test_what_ended_the_script_is_told_while_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hook of somebody's has taken the place of ours, the exit tells, and the group is left at exit too."""
    done: list[str] = []
    monkeypatch.setattr(worker_module.last_words, "tell_what_ended", lambda: done.append("told"))
    monkeypatch.setattr(worker_module, "_leave", lambda verifies: done.append("left"))
    worker_module._leave_at_exit()
    assert done == ["told", "left"]
