"""The test bench itself: what it reports, what it refuses to pass, and that it leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.cluster import PATIENCE, ClusterFailure, run_ranks, spawn_ranks
from tests.cluster.leaks import PERMANENT_PIDS, RUN_VARIABLE
from tests.cluster.process import ROOT, SEARCH_PATH

# Things that the functions below leak on purpose; a module's attribute keeps them alive.
_kept: list[Any] = []


def _total(rank: int, world: int, start: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    total = torch.full_like(start, rank * scale)
    dist.all_reduce(total)
    return start + total


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_come_back_by_rank_with_arguments_passed_on(world: int) -> None:
    results = run_ranks(world, _total, torch.ones(2), scale=2.0)
    expected = torch.ones(2) + 2.0 * sum(range(world))
    assert len(results) == world
    for result in results:
        assert torch.equal(result, expected)


def _describe_worker(rank: int, world: int) -> dict[str, Any]:
    os.environ["LEFT_BY_THE_CALL_BEFORE"] = "1"
    torch.set_default_dtype(torch.float64)
    return {
        "pid": os.getpid(),
        "rank": (rank, int(os.environ["RANK"]), dist.get_rank() if dist.is_initialized() else None),
        "world": (world, int(os.environ["WORLD_SIZE"])),
        "address": os.environ["MASTER_ADDR"],
        "draw": torch.rand(3, dtype=torch.float32).tolist(),
        "threads": torch.get_num_threads(),
    }


def _see_what_is_left(rank: int, world: int) -> tuple[int, bool, torch.dtype]:
    return os.getpid(), "LEFT_BY_THE_CALL_BEFORE" in os.environ, torch.get_default_dtype()


def test_workers_stay_and_each_call_starts_as_the_first_did() -> None:
    first = run_ranks(2, _describe_worker)
    second = run_ranks(2, _see_what_is_left)
    again = run_ranks(2, _describe_worker)
    assert [seen["pid"] for seen in first] == [pid for pid, _, _ in second]
    assert [seen[1:] for seen in second] == [(False, torch.float32)] * 2
    assert first == again
    for rank, seen in enumerate(first):
        assert seen["rank"] == (rank, rank, rank)
        assert seen["world"] == (2, 2)
        assert seen["address"] == "127.0.0.1"
        assert seen["draw"] == first[0]["draw"]
        assert seen["threads"] == 1


def _make_own_group(rank: int, world: int) -> float:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)


def test_without_a_backend_the_environment_allows_to_make_the_group() -> None:
    assert run_ranks(3, _make_own_group, backend=None) == [3.0, 3.0, 3.0]


def _read_variable(rank: int, world: int, name: str) -> str | None:
    return os.environ.get(name)


def test_variables_are_set_for_one_call_only() -> None:
    assert run_ranks(2, _read_variable, "FOR_THIS_CALL", env={"FOR_THIS_CALL": "yes"}) == ["yes", "yes"]
    assert run_ranks(2, _read_variable, "FOR_THIS_CALL") == [None, None]


def _make_subgroups(rank: int, world: int) -> int:
    return len([dist.new_group([0]), dist.new_group([0, 1])])


def test_subgroups_that_nobody_keeps_are_taken_down_with_the_call() -> None:
    assert run_ranks(2, _make_subgroups) == [2, 2]


def _threads_in_fork_server(rank: int, world: int) -> int:
    from tests.cluster import preload

    return preload.THREADS_AFTER_IMPORT


def test_fork_server_has_no_threads_when_it_forks() -> None:
    assert run_ranks(1, _threads_in_fork_server, backend=None) == [1]


def _fail_on(rank: int, world: int, failing: int, others_hang: bool) -> int:
    if rank == failing:
        raise ValueError(f"rank {rank} has had enough")
    if others_hang:
        time.sleep(1000)
    return rank


def test_failure_names_the_rank_and_shows_its_traceback() -> None:
    with pytest.raises(ClusterFailure) as caught:
        run_ranks(3, _fail_on, 1, False)
    assert list(caught.value.errors) == [1]
    assert "ValueError: rank 1 has had enough" in caught.value.errors[1]
    assert "in _fail_on" in caught.value.errors[1]
    assert "rank 1 raised: Traceback" in str(caught.value)


@pytest.mark.thorough
def test_ranks_that_hang_after_a_failure_are_killed_and_the_next_call_is_clean() -> None:
    started = time.monotonic()
    with pytest.raises(ClusterFailure) as caught:
        run_ranks(2, _fail_on, 0, True, timeout_s=100)
    assert time.monotonic() - started < 30
    assert list(caught.value.errors) == [0, 1]
    assert "in _fail_on" in caught.value.errors[1]
    assert run_ranks(2, _fail_on, -1, False) == [0, 1]


def _reduce_except(rank: int, world: int, absent: int) -> None:
    if rank != absent:
        dist.all_reduce(torch.ones(1))
    else:
        raise ValueError("not coming")


def test_peers_of_a_failed_rank_see_their_connection_close() -> None:
    with pytest.raises(ClusterFailure) as caught:
        run_ranks(3, _reduce_except, 2)
    assert next(iter(caught.value.errors)) == 2
    assert all("Traceback" in text for text in caught.value.errors.values())


def _sleep_on(rank: int, world: int, sleeper: int) -> int:
    if rank == sleeper:
        time.sleep(1000)
    return rank


@pytest.mark.thorough
def test_time_limit_names_the_unfinished_rank_and_where_it_was() -> None:
    with pytest.raises(ClusterFailure, match="rank 1 did not finish in time") as caught:
        run_ranks(3, _sleep_on, 1, timeout_s=1)
    assert list(caught.value.errors) == [1]
    assert "in _sleep_on" in caught.value.errors[1]
    assert run_ranks(3, _sleep_on, -1) == [0, 1, 2]


def _exit_on(rank: int, world: int, code: int) -> None:
    if rank == 1:
        os._exit(code)


def test_a_pooled_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(ClusterFailure, match="rank 1 died: its process ended with exit code 7"):
        run_ranks(2, _exit_on, 7)


def test_a_kind_of_leak_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'thread' is not a valid Leak"):
        run_ranks(1, _see_what_is_left, allow_leaks=["thread"])


def _give_back_a_lock(rank: int, world: int) -> Any:
    return threading.Lock()


def test_a_value_that_cannot_travel_is_a_failure_of_its_rank() -> None:
    with pytest.raises(ClusterFailure, match=r"cannot pickle '_thread\.lock'"):
        run_ranks(1, _give_back_a_lock, backend=None)


def _leak_on_rank_1(rank: int, world: int, kinds: list[str], shm_name: str = "") -> None:
    if rank != 1:
        return
    if "threads" in kinds:
        threading.Thread(target=time.sleep, args=(1000,), name="forgotten", daemon=True).start()
    if "native_threads" in kinds:
        _kept.append(dist.group.WORLD)
    if "children" in kinds:
        _kept.append(subprocess.Popen(["sleep", "1000"]))
    if "memfd" in kinds:
        _kept.append(os.memfd_create("forgotten"))
    if "shm" in kinds:
        # Held open, so that a test run beside this one knows it for somebody else's.
        _kept.append(open(f"/dev/shm/{shm_name}", "w"))


@pytest.fixture
def shm_name() -> Iterator[str]:
    name = f"phalanx-test-{os.getpid()}"
    yield name
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


@pytest.mark.quiet  # a file in /dev/shm that nobody holds would be found by the tests beside it
def test_leaks_fail_the_call_and_the_next_one_gets_other_workers(shm_name: str) -> None:
    before = run_ranks(2, _see_what_is_left)
    kinds = ["threads", "native_threads", "children", "memfd", "shm"]
    with pytest.raises(ClusterFailure, match="rank 1 left behind: ") as caught:
        run_ranks(2, _leak_on_rank_1, kinds, shm_name)
    # Of a file in /dev/shm nobody can tell which rank made it, so every rank reports it.
    assert caught.value.errors[0] == f"shm: /dev/shm/{shm_name}"
    lines = caught.value.errors[1].splitlines()
    assert {line.split(":")[0] for line in lines} == set(kinds)
    assert "threads: 'forgotten' still runs" in lines
    assert f"shm: /dev/shm/{shm_name}" in lines
    assert not set(before) & set(run_ranks(2, _see_what_is_left))


@pytest.mark.parametrize("kind", ["threads", "native_threads", "children", "memfd"])
def test_an_allowed_leak_passes_and_costs_the_workers(kind: str) -> None:
    before = run_ranks(2, _see_what_is_left)
    run_ranks(2, _leak_on_rank_1, [kind], allow_leaks=[kind])
    assert not set(before) & set(run_ranks(2, _see_what_is_left))


@pytest.mark.quiet  # a file in /dev/shm that nobody holds would be found by the tests beside it
def test_a_file_left_in_dev_shm_by_fresh_ranks_fails_the_call(shm_name: str) -> None:
    with pytest.raises(ClusterFailure, match=f"/dev/shm/{shm_name}"):
        spawn_ranks(2, _leak_on_rank_1, ["shm"], shm_name, backend=None)
    Path(f"/dev/shm/{shm_name}").unlink()
    spawn_ranks(2, _leak_on_rank_1, ["shm"], shm_name, backend=None, check_shm=False)


def test_a_file_that_another_process_holds_is_not_ours(shm_name: str) -> None:
    path = Path(f"/dev/shm/{shm_name}")
    hold = f"held = open({str(path)!r}, 'w'); print(flush=True); input()"
    environment = {**os.environ, RUN_VARIABLE: "of another run"}
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as stranger:
        assert stranger.stdout is not None
        # The file appears during the call, as it would with a second test run on the machine.
        results = run_ranks(2, _wait_for_line_of, str(path), backend=None)
        stranger.communicate(b"\n")
    assert results == [True, True]


def _wait_for_line_of(rank: int, world: int, path: str) -> bool:
    deadline = time.monotonic() + 20
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.exists(path)


def _end_differently(rank: int, world: int) -> str:
    match rank:
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            raise ValueError("a rank of its own mind")
        case 3:
            sys.exit(5)
    return f"value of {rank}"


def test_fresh_ranks_report_how_each_of_them_ended() -> None:
    outcomes = spawn_ranks(4, _end_differently, backend=None)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL, 1, 5]
    assert [outcome.value for outcome in outcomes] == ["value of 0", None, None, None]
    assert outcomes[0].error_text is None
    assert "a rank of its own mind" in (outcomes[2].error_text or "")
    assert not any(outcome.timed_out for outcome in outcomes)


def _kill_one_and_reduce(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_survivors_of_a_killed_fresh_rank_get_their_error() -> None:
    outcomes = spawn_ranks(3, _kill_one_and_reduce, timeout_s=30)
    assert [outcome.exitcode for outcome in outcomes] == [1, -signal.SIGKILL, 1]
    assert all("all_reduce" in (outcomes[rank].error_text or "") for rank in (0, 2))
    assert all(0 < outcome.seconds < 30 for outcome in outcomes)


@pytest.mark.thorough
def test_a_fresh_rank_that_overruns_is_killed_and_marked() -> None:
    outcomes = spawn_ranks(2, _sleep_on, 1, timeout_s=1)
    assert [outcome.timed_out for outcome in outcomes] == [False, True]
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].value == 0
    assert "in _sleep_on" in (outcomes[1].error_text or "")


def _start_child_and_die(rank: int, world: int, pid_path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_path).write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_fresh_rank_started_dies_with_it(tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    spawn_ranks(1, _start_child_and_die, str(pid_path), backend=None)
    assert _soon_gone(int(pid_path.read_text()))


def _soon_gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def _print_and_die(rank: int, world: int) -> None:
    print(f"last words of rank {rank}")
    os.kill(os.getpid(), signal.SIGKILL)


SESSION_THAT_IS_KILLED = """
import os, signal
from tests.cluster import run_ranks, spawn_ranks
from tests.cluster.pool import _workers
from tests.test_cluster import _print_and_die, _see_what_is_left
if __name__ == "__main__":
    spawn_ranks(1, _print_and_die, backend=None)
    run_ranks(2, _see_what_is_left, backend=None)
    print(*(worker.pid for worker in _workers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_a_killed_test_run_leaves_no_worker_and_has_all_that_was_printed(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION_THAT_IS_KILLED)
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "TMPDIR": str(tmp_path)}
    killed = subprocess.run(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, timeout=60 * PATIENCE, check=False
    )
    printed, pids = killed.stdout.splitlines()
    assert killed.returncode == -signal.SIGKILL
    assert printed == "last words of rank 0"
    assert len(pids.split()) == 2
    assert all(_soon_gone(int(pid)) for pid in pids.split())


TESTS_THAT_LEAK = """
import os, subprocess, threading, time
import pytest
import torch.distributed as dist

def test_leaks():
    global child
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    child = subprocess.Popen(["sleep", "30"])
    os.environ["LEFT_BEHIND"] = "1"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@pytest.mark.allow_leaks("environment")
def test_may_leave_a_variable():
    os.environ["LEFT_WITH_LEAVE"] = "1"

def test_undoes_what_it_did(monkeypatch):
    monkeypatch.setenv("PUT_BACK", "1")
    threading.Thread(target=time.sleep, args=(0.2,)).start()
"""


@pytest.mark.thorough
def test_a_test_that_leaks_in_the_pytest_process_is_failed(tmp_path: Path) -> None:
    module = tmp_path / "test_inner.py"
    module.write_text(TESTS_THAT_LEAK)
    inner = subprocess.run(
        [sys.executable, "-m", "pytest", "-rE", "-p", "tests.conftest", f"--rootdir={tmp_path}", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100 * PATIENCE,
        check=False,
    )
    errors = [line for line in inner.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 1, inner.stdout
    assert "::test_leaks" in errors[0]
    for kind in ("threads", "children", "environment: LEFT_BEHIND", "groups"):
        assert f"\n{kind}" in inner.stdout, inner.stdout


def test_no_worker_is_a_child_of_the_pytest_process() -> None:
    run_ranks(2, _see_what_is_left)
    assert multiprocessing.active_children(), "the pool keeps its workers between calls"
    children = [child for child in psutil.Process().children() if child.pid not in PERMANENT_PIDS]
    commands = [" ".join(child.cmdline()) for child in children]
    assert all("multiprocessing" in command for command in commands)
