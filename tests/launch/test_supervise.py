"""Who ended how, and what is done about it: the policy alone, and a supervisor with another policy plugged in."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.agent import LaunchSettings, _environment
from phalanx.launch.failure import summarize
from phalanx.launch.logs import Follower, Keeper, RankLogs
from phalanx.launch.rendezvous import OneHost
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.start.child import Child
from phalanx.launch.start.order import Order
from phalanx.launch.start.starter import signals_blocked
from phalanx.launch.start.starting import Starting
from phalanx.launch.supervise.numbering import Round, first_rank, variables
from phalanx.launch.supervise.policy import AllOrNone, Decision, Ended, Event, HostsChanged, Started
from phalanx.launch.supervise.supervisor import Crew, Supervisor, signals_raise
from phalanx.launch.supervise.team import Interrupted, Team

pytestmark = pytest.mark.timeout(60)


def started(policy: AllOrNone, count: int) -> AllOrNone:
    for local_rank in range(count):
        assert policy.hear(Started(local_rank)) is Decision.GO_ON
    return policy


def test_a_run_is_finished_by_its_last_worker() -> None:
    policy = started(AllOrNone(0), 3)
    said = [policy.hear(Ended(local_rank, 0)) for local_rank in (2, 0, 1)]
    assert said == [Decision.GO_ON, Decision.GO_ON, Decision.FINISHED]


@pytest.mark.parametrize("code", [1, 3, -signal.SIGKILL])
def test_a_failure_ends_all_once_no_restart_is_left(code: int) -> None:
    policy = started(AllOrNone(2), 2)
    for restarts in (1, 2):
        assert policy.hear(Ended(1, code)) is Decision.AGAIN and policy.restarts == restarts
        started(policy, 2)
    assert policy.hear(Ended(0, code)) is Decision.FAILED and policy.restarts == 2


def test_another_host_is_no_restart() -> None:
    policy = started(AllOrNone(0), 1)
    assert policy.hear(HostsChanged()) is Decision.AGAIN and policy.restarts == 0
    assert started(policy, 1).hear(Ended(0, 0)) is Decision.FINISHED


@given(st.integers(1, 5), st.integers(0, 3), st.data())
def test_every_history_ends_and_counts_its_failures(nproc: int, max_restarts: int, data: st.DataObject) -> None:
    policy, failures = started(AllOrNone(max_restarts), nproc), 0
    running = set(range(nproc))
    for _ in range(200):
        event: Event = data.draw(
            st.sampled_from([Ended(rank, code) for rank in sorted(running) for code in (0, 1)] + [HostsChanged()])
        )
        decision = policy.hear(event)
        if isinstance(event, Ended):
            running.discard(event.local_rank)
            failures += event.exitcode != 0
        assert policy.restarts == min(failures, max_restarts)
        if decision is Decision.AGAIN:
            running = set(range(nproc))
            started(policy, nproc)
        elif decision is Decision.FINISHED:
            assert not running and failures <= max_restarts
            return
        elif decision is Decision.FAILED:
            assert failures == max_restarts + 1
            return
        else:
            assert running


def test_workers_are_numbered_by_hosts_in_torchruns_words() -> None:
    assert [first_rank([2, 3, 1], host) for host in range(3)] == [0, 2, 5]
    place = Round(1, 3, 2, 6, "10.0.0.1", 29500, is_served=True)
    found = variables(place, 2, 3, "run", 1, 4)
    assert (found["RANK"], found["LOCAL_RANK"], found["GROUP_RANK"], found["ROLE_RANK"]) == ("4", "2", "1", "4")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["GROUP_WORLD_SIZE"]) == ("6", "3", "3")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"


class Replacing:
    """A worker that fails is replaced, the others go on: what an elastic run needs."""

    def __init__(self) -> None:
        self.restarts = 0
        self.events: list[Event] = []
        self._running: set[int] = set()

    def hear(self, event: Event) -> Decision:
        self.events.append(event)
        if isinstance(event, Started):
            self._running.add(event.local_rank)
        elif isinstance(event, Ended):
            self._running.discard(event.local_rank)
            if event.exitcode != 0:
                self.restarts += 1
                return Decision.REPLACE
            if not self._running:
                return Decision.FINISHED
        return Decision.GO_ON


REPLACED = """
import os, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists(sys.argv[1]): time.sleep(0.02)
    print("went on", os.environ["TORCHELASTIC_RESTART_COUNT"])
elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
else:
    print("replaced")
    open(sys.argv[1], "w").close()
"""


def test_another_policy_replaces_one_worker_while_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPLACED)
    directory, lines = RunDirectory.create(tmp_path / "runs", "train"), []
    follower = Follower(lambda *line: lines.append(line))
    keeper = Keeper(follower, lambda line: None)
    logs, policy, rendezvous = RankLogs(directory, keeper, tracing=False), Replacing(), OneHost("run", 2)
    command = (str(tmp_path / "train.py"), str(tmp_path / "mark"))
    with _environment(LaunchSettings(command, 2), {}), signals_raise():
        starting = Starting(os.environ, 2, can_restart=True)
        team = Team(starting.start)
        starting.begin()
        try:
            assert Supervisor(Crew(command, 2, 0, 5.0), team, policy, rendezvous, logs).run(starting.wait)
        finally:
            starting.close(), keeper.close(), follower.close(), rendezvous.leave("")
    assert sorted(line for _, _, line in lines) == ["replaced", "went on 0"]
    assert policy.events.count(Started(0)) == 1, "the survivor was never started again"
    assert policy.events[:4] == [Started(0), Started(1), Ended(1, -signal.SIGKILL), Started(1)]


def test_a_worker_that_the_launcher_killed_did_not_fail_first(tmp_path: Path) -> None:
    def start(order: Order) -> Child:
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return Child(process.pid, process.poll)

    team = Team(start)
    team.start({rank: Order((), {}, 1, 2) for rank in range(3)})
    os.kill(team.pid(2), signal.SIGKILL)
    codes: dict[int, int] = {}
    while len(codes) < 3:
        codes |= team.newly_ended()
        if 2 in codes:
            for rank in range(3):  # also one that has just ended by itself
                team.kill_one(rank, "the run was given up")
    assert set(codes.values()) == {-signal.SIGKILL}
    summary = summarize(RunDirectory.create(tmp_path, "train"), 0, team.exitcodes())
    assert summary is not None and summary.first.rank == 2
    assert [end.how for end in summary.others] == ["ended by the launcher"] * 2


def test_a_signal_is_an_exception_that_nothing_takes_for_its_own() -> None:
    with pytest.raises(Interrupted) as caught, signals_raise():
        try:
            signal.raise_signal(signal.SIGHUP)
        except Exception:
            pytest.fail("it was swallowed")
    assert caught.value.signal is signal.SIGHUP


def test_a_launcher_that_was_started_with_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raise():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_another_thread_takes_waits_for_the_end_of_the_block_too() -> None:
    """Or a worker would be started that nobody knows of, and its children live on after the run."""
    done, reached = threading.Event(), False
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(Interrupted) as caught, signals_raise():
            with signals_blocked():
                # To the whole process: the main thread does not take it, so the other one does.
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10):
                    time.sleep(0.02)
                reached = True
            pytest.fail("it was lost")
    finally:
        done.set()
        other.join()
    assert reached and caught.value.signal is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
