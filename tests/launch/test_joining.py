"""A rank that ends before the ranks have met is named by the others and by the launcher, within seconds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from phalanx.errors import PeerFailure
from phalanx.launch.environment import Environment
from phalanx.launch.joining import _open, join
from phalanx.launch.records.ends import EndsFile, ends_known_to
from phalanx.launch.variables import RUN_STORE
from tests.cluster.command import Command, run_command
from tests.launch.test_worker import free_port

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 60  # of the group; what is tested is that nobody waits for it
SOON_S = 30  # with starting torch on a busy machine

SCRIPT = f"""
import os, signal, sys
fault, backend, how = sys.argv[1:]
me = int(os.environ["RANK"])
if me == 1 and fault == "exit":
    sys.exit(0)
from datetime import timedelta
import torch.distributed as dist
import phalanx
from phalanx.errors import PeerFailure
if me == 1 and fault == "inside":
    dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
try:
    if how == "init":
        phalanx.init(backend, timeout_s={LIMIT_S})
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds={LIMIT_S}))
except PeerFailure as error:
    print(f"TOLD {{me}} {{error.ranks}} {{error}}", flush=True)
    raise
"""


def told(text: str) -> list[str]:
    """What survivors said, from any launcher's output."""
    return [line[line.index("TOLD") :] for line in text.splitlines() if "TOLD" in line]


def test_the_list_of_ends_says_how_and_begins_anew() -> None:
    ends = EndsFile()
    try:
        known = ends_known_to({"PHALANX_ENDS": ends.path})
        assert known([0, 1, 2]) == {}
        ends.note(0, 0)
        ends.note(1, -signal.SIGKILL)
        ends.note(2, 3)
        assert known([0, 1]) == {0: "ended with exit code 0", 1: "was killed by SIGKILL"}
        ends.begin()
        ends.note(2, 0)
        assert known([0, 1, 2]) == {2: "ended with exit code 0"}
    finally:
        ends.close()
    assert known([2]) == {}, "the launcher is gone"


@pytest.mark.parametrize(
    ("backend", "how"), [("phalanx", "init"), ("gloo", "torch"), pytest.param("gloo", "init", marks=pytest.mark.thorough)]
)
def test_a_run_names_the_rank_that_ended_before_it_joined(backend: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", "3", "--run-dir", str(tmp_path / "runs")]
    started = time.monotonic()
    script = [str(tmp_path / "train.py"), "exit", backend, how]
    run = Command([*command, *script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 1 and time.monotonic() - started < SOON_S, err
    said = told(out + err)
    assert said and all("rank 1 ended with exit code 0, before the ranks had met" in line for line in said), out + err
    assert "what to do: rank 1 ended without an error and never joined the others" in err


def test_under_torchrun_a_rank_that_is_no_more_is_missed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = time.monotonic()
    done = run_command(
        [*command, str(tmp_path / "train.py"), "exit", "gloo", "init"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and time.monotonic() - started < SOON_S, done.stderr
    assert any("rank 1 has ended, before the ranks had met" in line for line in told(done.stdout)), done.stdout


@pytest.mark.parametrize("backend", ["phalanx", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_a_rank_that_dies_while_the_group_is_made_is_named_without_a_launcher(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(tmp_path / "train.py"), "inside", backend, "init"]
    started = time.monotonic()
    environs = [{**os.environ, **place, "RANK": str(rank)} for rank in range(3)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    ranks = [Command(command, env=environ, text=True, **streams) for environ in environs]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert time.monotonic() - started < SOON_S
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1], "the fault fired"
    for rank in (0, 2):
        assert told(outputs[rank]) and told(outputs[rank])[0].startswith(f"TOLD {rank} (1,)"), outputs[rank]


def test_worlds_are_counted_in_their_store_and_not_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has been in another world at the same port meets ranks that have not."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "PHALANX_AGENT_PID", RUN_STORE):
        monkeypatch.delenv(name, raising=False)
    port, limit = free_port(), timedelta(seconds=10)
    first, second = (Environment("test", rank, 2, rank, 2, "127.0.0.1", port) for rank in range(2))
    for _ in range(2):
        # Stores, one after the other, at one port.
        stores = [_open(first, limit, True), _open(second, limit, False)]
        stores[0].set("word", "of the first world")
        assert stores[1].get("word") == b"of the first world"
        again = [_open(first, limit, False), _open(second, limit, False)]
        assert not again[1].check(["word"]), "a world that follows in the same store reads nothing of the one before"
        again[1].set("word", "of the second")
        assert again[0].get("word") == b"of the second"
        third = _open(first, limit, False)
        del stores, again, third
        gc.collect()


def test_a_store_that_nobody_serves_is_waited_for_in_silence_until_the_time_limit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """c10d by itself writes a line per attempt, with a stack each, and takes up to twice as long."""
    monkeypatch.delenv(RUN_STORE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    environment = Environment("test", 1, 2, 1, 2, "127.0.0.1", free_port())
    started = time.monotonic()
    with pytest.raises(PeerFailure, match="nobody listens there after 1 s") as caught:
        join(environment, "gloo", timedelta(seconds=1), on_cpu=True)
    assert caught.value.ranks == (0,) and time.monotonic() - started < 5
    assert capfd.readouterr().err == ""
