"""Reading launchers' variables: every launcher we name, and environments that contradict themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.launch.environment import Environment, detect, first_host, tasks_on_node

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_a_process_started_alone_is_a_world_of_one() -> None:
    assert detect({"PATH": "/bin"}) == Environment("alone", 0, 1, 0, 1)


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, "head", 1234)


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({"GROUP_WORLD_SIZE": "2"}, True),
        # A host with one rank beside hosts with several: all must come to the same answer.
        ({"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, True),
        ({"GROUP_WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({}, False),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5"}, True),
    ],
)
def test_whether_hosts_hold_several_ranks_is_the_same_on_every_rank(changes: dict[str, str], shares: bool) -> None:
    assert detect({**TORCHRUN, **changes}).shares_hosts is shares


def test_slurm_says_on_how_many_nodes_a_step_runs() -> None:
    assert detect({**SLURM, "SLURM_STEP_NUM_NODES": "3"}).shares_hosts
    assert not detect({**SLURM, "SLURM_STEP_NUM_NODES": "5"}).shares_hosts


def test_rank_and_world_alone_on_loopback_are_one_host() -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "3"})
    assert found.one_host and found.local_rank == 1 and found.port == 29500


def test_rank_and_world_alone_with_a_remote_host_are_one_worker_a_host() -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.7"})
    assert (found.local_rank, found.local_world, found.one_host) == (0, 1, False)


def test_slurm_tasks_find_their_host_and_meeting_point() -> None:
    found = detect(SLURM)
    assert (found.launcher, found.rank, found.world) == ("slurm", 3, 5)
    assert (found.local_rank, found.local_world, found.host) == (1, 2, "gpu03")


def test_two_slurm_jobs_and_two_steps_of_a_job_meet_on_different_ports() -> None:
    ports = {detect(SLURM | change).port for change in ({}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"})}
    assert len(ports) == 3


def test_a_slurm_batch_script_without_srun_is_alone() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"}
    assert detect(batch).launcher == "alone"


@pytest.mark.parametrize(("environ", "launcher"), [(OPEN_MPI, "openmpi"), (MPICH, "mpich")])
def test_mpi_on_one_host_needs_no_address(environ: dict[str, str], launcher: str) -> None:
    found = detect(environ, parent_pid=777)
    assert (found.launcher, found.rank, found.world, found.local_rank) == (launcher, 1, 2, 1)
    assert found.host == "127.0.0.1"
    assert found.port == detect(environ, parent_pid=777).port != detect(environ, parent_pid=778).port


@pytest.mark.parametrize(
    "environ",
    [OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, MPICH | {"PMI_SIZE": "4"}],
)
def test_mpi_over_hosts_asks_for_an_address_and_then_takes_it(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Set MASTER_ADDR"):
        detect(environ)
    found = detect(environ | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert (found.host, found.port) == ("head", 99)


def test_variables_set_by_hand_win_over_the_scheduler() -> None:
    assert detect(SLURM | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK should be a whole number, got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 in a world of 2"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "tasks per node 'two'"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "no SLURM_STEP_NUM_TASKS"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[003-005,9],login1", "gpu003"), ("n[7,9]", "n7"), ("r[1-2]n", "r1n")],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_tasks_per_node_read_back_what_slurm_would_write(tasks: list[int]) -> None:
    runs: list[tuple[int, int]] = []
    for count in tasks:
        if runs and runs[-1][0] == count:
            runs[-1] = (count, runs[-1][1] + 1)
        else:
            runs.append((count, 1))
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert [tasks_on_node(text, node) for node in range(len(tasks))] == tasks
