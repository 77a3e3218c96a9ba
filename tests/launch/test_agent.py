"""Real workers started by the agent: output, failure, restart, and several hosts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.agent import LaunchSettings, Outcome, launch
from phalanx.launch.rundir import RunDirectory
from tests.cluster import PATIENCE, reserved_port
from tests.cluster.command import Command

pytestmark = pytest.mark.timeout(60)

PREAMBLE = """
import os, sys, time
import torch, torch.distributed as dist
from phalanx.launch.worker import init
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(PREAMBLE + textwrap.dedent(body))
    return path


class Launched:
    """A run in a folder, with what it said."""

    def __init__(self, folder: Path, body: str, *arguments: str, nproc: int = 2, **options: object) -> None:
        self.directory = RunDirectory.create(folder / "runs", "train")
        self.lines: list[tuple[int, str, str]] = []
        settings = LaunchSettings((str(script(folder, body)), *arguments), nproc, **options)  # type: ignore[arg-type]
        self.outcome: Outcome = launch(settings, self.directory, lambda *line: self.lines.append(line))

    def said(self, rank: int, stream: str = "stdout") -> list[str]:
        return [line for who, where, line in self.lines if (who, where) == (rank, stream)]


def test_every_rank_runs_with_its_arguments_and_its_lines_arrive_and_are_kept(tmp_path: Path) -> None:
    body = """
    worker = init()
    print(worker.rank, worker.world, sys.argv[1:], __name__, os.path.basename(__file__))
    print("warning", file=sys.stderr)
    sys.stdout.write("no end of line")
    """
    run = Launched(tmp_path, body, "--lr", "0.1")
    assert run.outcome.exitcode == 0 and run.outcome.failure is None
    for rank in range(2):
        assert run.said(rank) == [f"{rank} 2 ['--lr', '0.1'] __main__ train.py", "no end of line"]
        assert "warning" in run.said(rank, "stderr")
        assert "no end of line" in run.directory.rank(0, rank).stdout.read_text()
    assert run.directory.facts()["state"] == "finished"


def test_the_first_failure_is_told_with_what_the_others_were_doing(tmp_path: Path) -> None:
    body = """
    worker = init("gloo")
    def load_batch():
        time.sleep(60)
    def train():
        if worker.rank == 1:
            time.sleep(1.0)
            raise ValueError("label 7 is out of range")
        load_batch()
    train()
    """
    run = Launched(tmp_path, body)
    failure = run.outcome.failure
    assert failure is not None and run.outcome.exitcode == 1
    assert failure.first.rank == 1 and failure.first.message == "ValueError: label 7 is out of range"
    assert "bootstrap.py" not in failure.first.traceback and "in train" in failure.first.traceback
    assert failure.others[0].doing == "in load_batch (train.py:8)"
    facts = json.loads((run.directory.root / "run.json").read_text())
    assert facts["state"] == "failed" and facts["failure"]["rank"] == 1


def test_a_killed_rank_is_named_and_not_the_peer_that_noticed(tmp_path: Path) -> None:
    body = """
    worker = init("gloo")
    if worker.rank == 0:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))
    """
    failure = Launched(tmp_path, body).outcome.failure
    assert failure is not None and (failure.first.rank, failure.first.how) == (0, "killed by SIGKILL")


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_was_terminated_from_outside_is_named(tmp_path: Path, backend: str) -> None:
    body = f"""
    worker = init("{backend}")
    dist.all_reduce(torch.ones(1))
    if worker.rank == 1:
        os.kill(os.getpid(), 15)
    while True:
        dist.all_reduce(torch.ones(1))
    """
    failure = Launched(tmp_path, body).outcome.failure
    assert failure is not None and (failure.first.rank, failure.first.how) == (1, "killed by SIGTERM")
    assert failure.first.message == failure.first.how
    assert "SIGTERM came from outside" in failure.hint


def test_a_restart_gets_a_new_attempt(tmp_path: Path) -> None:
    body = """
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
    """
    run = Launched(tmp_path, body, nproc=1, max_restarts=1)
    assert run.outcome.exitcode == 0
    assert run.said(0) == ["attempt 0", "attempt 1"]
    assert run.directory.last_attempt() == run.directory.attempt(1)


def test_a_signal_while_the_end_is_written_down_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, states = RunDirectory.record, []

    def with_a_signal(directory: RunDirectory, **facts: object) -> None:
        states.append(facts.get("state"))
        if states[-1] == "finished":
            signal.raise_signal(signal.SIGTERM)
        record(directory, **facts)

    monkeypatch.setattr(RunDirectory, "record", with_a_signal)
    run = Launched(tmp_path, "", nproc=1)
    assert run.outcome.exitcode == 0 and run.directory.facts()["state"] == states[-1] == "finished"


def test_a_script_may_have_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    name = "n" * 252 + ".py"
    (tmp_path / name).touch()
    assert name[:50] in RunDirectory.create(tmp_path / "runs", Path(name).stem).root.name


def test_many_restarts_take_no_more_descriptors_than_one(tmp_path: Path) -> None:
    body = """
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts in (1, 6):
        time.sleep(0.5)  # for the launcher to be done with the one before
        print(len(os.listdir(f"/proc/{os.getppid()}/fd")))
    sys.exit(3)
    """
    after_one, after_six = Launched(tmp_path, body, nproc=1, max_restarts=6).said(0)
    assert after_one == after_six


def test_tracing_holds_warnings_and_the_failure(tmp_path: Path) -> None:
    body = """
    import warnings
    warnings.warn("slow path")
    raise KeyError("x")
    """
    run = Launched(tmp_path, body, nproc=1, tracing=True)
    text = (run.directory.attempt(0) / "trace-rank00000.jsonl").read_text()
    assert "UserWarning: slow path" in text and "KeyError: 'x'" in text


@pytest.mark.parametrize(
    ("numbered", "cold"),
    [(True, False), *(pytest.param(*more, marks=pytest.mark.thorough) for more in [(False, False), (True, True)])],
)
def test_two_hosts_meet_at_an_endpoint(tmp_path: Path, numbered: bool, cold: bool) -> None:
    # A rank that ended at once would close its connections to one that is still making them.
    body = "worker = init('gloo'); print('rank', worker.rank, 'of', worker.world); dist.barrier()"
    path = script(tmp_path, body)
    hosts = []
    with reserved_port() as port:
        for number in range(2):
            command = [sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", "1", "--nnodes", "2"]
            command += ["--endpoint", f"127.0.0.1:{port}", "--run-dir", str(tmp_path / f"host{number}")]
            command += ["--node-rank", str(number)] if numbered else []
            environ = os.environ | {"PHALANX_SECRET": "a secret of the tests"}
            # Cold: in fresh interpreters, as on two hosts.
            hosts.append(Command([*command, str(path)], cold, stdout=subprocess.PIPE, text=True, env=environ))
        said = sorted(host.communicate(timeout=50 * PATIENCE)[0].strip().split("│ ")[-1] for host in hosts)
    assert said == ["rank 0 of 2", "rank 1 of 2"] and [host.returncode for host in hosts] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 0}, "at least one worker"),
        ({"nproc": 1, "max_nodes": 2}, "need a meeting point"),
        ({"nproc": 1, "min_nodes": 3, "max_nodes": 2, "endpoint": "a:1"}, "hosts must be 1 or more"),
        ({"nproc": 1, "max_nodes": 2, "endpoint": "a:1", "node_rank": 2}, "host number 2"),
        ({"nproc": 1, "max_nodes": 2, "endpoint": "a:1"}, "need a secret that only they know"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchSettings(("train.py",), **options)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_hosts_start_again_together_after_a_failure_on_one(tmp_path: Path) -> None:
    body = """
    worker = init("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not os.path.exists(sys.argv[1])
    dist.barrier()
    if first and worker.rank == 1:
        open(sys.argv[1], "w").close()
        sys.exit(3)
    if first:
        time.sleep(60)
    total = torch.ones(1)
    dist.all_reduce(total)
    print("rank", worker.rank, "sum", total.item())
    """
    path = script(tmp_path, body)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    environ = os.environ | {"PHALANX_SECRET": "a secret of the tests"}
    hosts = []
    for number in range(2):
        command = [sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", "1", "--nnodes", "2", "--max-restarts", "1"]
        command += ["--endpoint", endpoint, "--run-dir", str(tmp_path / f"host{number}"), str(path), str(tmp_path / "mark")]
        hosts.append(Command(command, stdout=subprocess.PIPE, text=True, env=environ))
    said = sorted(host.communicate(timeout=55)[0].strip().split("│ ")[-1] for host in hosts)
    assert said == ["rank 0 sum 2.0", "rank 1 sum 2.0"] and [host.returncode for host in hosts] == [0, 0]
    assert (tmp_path / "mark").exists(), "the failure happened"
