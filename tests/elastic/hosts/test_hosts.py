"""Elastic runs on several hosts for real, in network namespaces, through every way in which a part of one can be lost.

What each run came to is computed again from what its ranks wrote down (`reference`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.elastic.hosts.runs import Hosts, hosts
from tests.elastic.program import Plan
from tests.security.intruder import needs_namespaces

pytestmark = [pytest.mark.timeout(150), needs_namespaces]
PAUSE_S = 0.02
# Both ways to keep a state are tried by `make test-thorough`; the divided one needs all that the other does, and mirrors.
BOTH = pytest.mark.parametrize("optimizer", [pytest.param("plain", marks=pytest.mark.thorough), "zero"])


def _plan(optimizer: str, what: str, moment: str, rank: int, step: int = 4, **rest: object) -> Plan:
    faults = ((what, moment, rank, step),)
    return Plan(optimizer=optimizer, faults=faults, pause_s=PAUSE_S, **rest)  # type: ignore[arg-type]


def _ended(run: Hosts, *codes: int) -> None:
    found = [run.runs[host].end(90) for host in range(len(codes))]
    assert found == list(codes), run.said()


@pytest.mark.thorough
@BOTH
def test_a_worker_that_dies_on_another_host_is_lost_alone(tmp_path: Path, optimizer: str) -> None:
    with hosts(2, tmp_path, _plan(optimizer, "kill", "backward", 3), "--nnodes", "2") as run:
        for host in range(2):
            run.start(host)
        _ended(run, 0, 0)
        # Its replacement may have come before the others have found together again, or before the end, or not.
        assert run.worlds()[0] in (3, 4), run.said()
        assert "rank 3 (worker 3) was lost: signal 9 (SIGKILL)" in run.runs[0].said()
        (folder,) = (tmp_path / "host-0" / "runs").iterdir()
        shown = {path.parent.name for path in folder.glob("attempt-0/rank-*/status.json")}
        assert {"rank-00000", "rank-00002"} <= shown, "the first host shows what workers of all hosts do"
        run.check()


@pytest.mark.thorough
def test_the_only_worker_of_a_host_dies_and_its_share_is_had_from_the_mirror(tmp_path: Path) -> None:
    # Nobody is left on the first host who could read what its launcher holds.
    with hosts(2, tmp_path, _plan("zero", "kill", "forward", 0), "--nnodes", "2") as run:
        for host in range(2):
            run.start(host, 1)
        _ended(run, 0, 0)
        assert run.worlds()[0] == 1, run.said()
        run.check()


@pytest.mark.parametrize(
    ("optimizer", "moment"),
    [
        pytest.param("plain", "backward", marks=pytest.mark.thorough),
        pytest.param("zero", "forward", marks=pytest.mark.thorough),
        ("zero", "write>"),
        pytest.param("overlap", "backward", marks=pytest.mark.thorough),
    ],
)
def test_a_host_whose_launcher_dies_is_lost_with_its_share(tmp_path: Path, optimizer: str, moment: str) -> None:
    with hosts(2, tmp_path, _plan(optimizer, "host", moment, 2), "--nnodes", "2") as run:
        for host in range(2):
            run.start(host)
        _ended(run, 0, -signal.SIGKILL)
        assert run.worlds() == [2], run.said()
        assert "(worker 2) was lost: with its host" in run.runs[0].said()
        run.check()


# In a barrier of c10d's own nobody looks up from waiting: the connections have to be cut.
@pytest.mark.parametrize(
    ("optimizer", "moment"), [pytest.param("plain", "backward", marks=pytest.mark.thorough), ("zero", "barrier<")]
)
def test_a_host_that_is_cut_off_ends_its_workers_and_the_others_go_on(tmp_path: Path, optimizer: str, moment: str) -> None:
    with hosts(2, tmp_path, _plan(optimizer, "cut", moment, 2), "--nnodes", "2") as run:
        for host in range(2):
            run.start(host)
        cut_off, ended = run.runs[1], run.runs[1].end(60)
        at_end = time.time()
        assert ended == 1 and "the first host, at 10.99.0.1:29400, was lost (no sign of life" in cut_off.said(), run.said()
        assert "2 workers of this host were ended at once" in cut_off.said()
        _ended(run, 0)
        assert run.worlds() == [2] and "no sign of life for 7 s" in run.runs[0].said()
        formed = [event["at_ns"] / 1e9 for event in run.events() if event["event"] == "forming"]
        assert at_end < formed[1] + 1, "they had ended before anybody went on without them"
        times = {event["event"]: event["at_ns"] / 1e9 for event in run.events()}
        assert times["formed"] - times["lost"] < 10, "not by the time limit of a collective, which is 20 s"
        run.check()


@pytest.mark.thorough
@BOTH
def test_a_host_joins_later_and_two_of_three_may_go_one_by_one(tmp_path: Path, optimizer: str) -> None:
    plan = Plan(optimizer=optimizer, pause_s=0.05, has_loader=False, until=str(tmp_path / "enough"))
    with hosts(3, tmp_path, plan, "--nnodes", "2:3", "--min", "1", "--max", "4") as run:
        first = run.start(0, 1)
        run.start(1, 1)
        run.wait_for_step(3)
        run.start(2, 2)
        first.wait_for("goes on with 4 ranks", 60)
        # Whoever leaves in order says so; its workers end first.
        run.runs[1].process.send_signal(signal.SIGTERM)
        assert run.runs[1].end() == 128 + signal.SIGTERM
        first.wait_for("its launcher was ended by SIGTERM")
        first.wait_for("goes on with 3 ranks", 60)
        run.runs[2].process.kill()
        first.wait_for("goes on with 1 rank", 60)
        (tmp_path / "enough").touch()
        assert first.end(90) == 0, run.said()
        run.check()


def test_when_the_first_host_dies_the_run_ends_everywhere_with_a_word(tmp_path: Path) -> None:
    with hosts(2, tmp_path, _plan("plain", "host", "backward", 0), "--nnodes", "2") as run:
        for host in range(2):
            run.start(host)
        begun = time.monotonic()
        _ended(run, -signal.SIGKILL, 1)
        said = run.runs[1].said()
        assert re.search(r"another host ended the run: the first host, at \S+, was lost \(the connection", said), said
        assert time.monotonic() - begun < 60
        processes = psutil.process_iter(["cmdline"])
        left = [one for one in processes if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
        assert not left, "nothing is left behind"


@pytest.mark.thorough
def test_a_host_and_the_only_worker_of_the_one_with_its_mirror_are_lost_and_the_others_wait(tmp_path: Path) -> None:
    plan = Plan(optimizer="zero", pause_s=0.1, has_loader=False, until=str(tmp_path / "enough"))
    with hosts(3, tmp_path, plan, "--nnodes", "3", "--min", "1") as run:
        for host in range(3):
            run.start(host, 1)
            if host:
                run.runs[0].wait_for(rf"host .* joined|{host + 1} of 3 hosts")
        run.wait_for_step(5)
        # The worker of the last host, which keeps the mirror of the one before.
        pids = {event["worker"]: event["pid"] for event in run.events() if event["event"] == "started"}
        on_hosts = {event["worker"]: event.get("host", 0) for event in run.events() if event["event"] == "started"}
        (killed,) = [worker for worker, number in on_hosts.items() if number == 2]
        os.kill(pids[killed], signal.SIGKILL)
        run.runs[1].process.kill()
        run.runs[0].wait_for("a part of the state is kept on .*, without a worker at the moment: waits up to 300 s")
        run.runs[0].wait_for("goes on with 2 ranks", 60)
        (tmp_path / "enough").touch()
        assert (run.runs[0].end(90), run.runs[2].end(90)) == (0, 0), run.said()
        run.check()


def test_two_hosts_at_once_end_the_run_and_point_to_the_checkpoint(tmp_path: Path) -> None:
    plan = Plan(optimizer="zero", pause_s=0.1, samples=2000)
    with hosts(3, tmp_path, plan, "--nnodes", "3") as run:
        for host in range(3):
            run.start(host, 1)
        run.wait_for_step(5)
        for host in (1, 2):
            run.runs[host].process.kill()
        _ended(run, 1, -signal.SIGKILL, -signal.SIGKILL)
        assert "every rank that held the state is lost" in run.runs[0].said(), run.said()
        assert "newest checkpoint" in run.runs[0].said()
