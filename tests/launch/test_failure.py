"""Cause and consequence, from files such as ranks leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from phalanx.errors import CollectiveTimeout, PeerFailure
from phalanx.launch.bootstrap import is_consequence
from phalanx.launch.failure import describe, read_stacks, summarize
from phalanx.launch.rundir import RunDirectory
from tests.cluster.process import SEARCH_PATH

STACKS = """Stack (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line 99 in <module>
"""


def write_error(directory: RunDirectory, rank: int, message: str, at_ns: int, consequence: bool = False) -> None:
    record: dict[str, Any] = {
        "message": {"message": message, "extraInfo": {"py_callstack": f"Traceback of rank {rank}"}},
        "phalanx": {"at_ns": at_ns, "consequence": consequence, "doing": [["/home/me/train.py", 5, "step"]]},
    }
    directory.rank(0, rank).error.write_text(json.dumps(record))


def test_the_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_error(directory, 0, "ValueError: late", 200)
    write_error(directory, 1, "ValueError: early", 100)
    summary = summarize(directory, 0, {0: 1, 1: 1})
    assert summary is not None and summary.first.rank == 1 and summary.first.traceback == "Traceback of rank 1"
    assert summary.others[0].message == "ValueError: late"


def test_errors_that_name_no_remedy_are_given_one(tmp_path: Path) -> None:
    for number, (message, remedy) in enumerate(
        [
            ("EOFError: EOF when reading a line", "workers have no keyboard"),
            ("bdb.BdbQuit", "debug one process"),
            ("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'", "no lambda"),
            ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "smaller batches"),
            ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "num_workers=0"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        directory = RunDirectory(tmp_path / str(number))
        write_error(directory, 0, message, 100)
        summary = summarize(directory, 0, {0: 1})
        assert summary is not None and remedy in summary.hint


def test_a_rank_that_blames_its_peer_is_not_the_cause_even_when_first(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_error(directory, 0, "PeerFailure: rank 1 died", 100, consequence=True)
    write_error(directory, 1, "KeyError: 'x'", 200)
    summary = summarize(directory, 0, {0: 1, 1: 1})
    assert summary is not None and summary.first.rank == 1


def test_a_killed_rank_is_the_cause_though_it_left_no_word(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_error(directory, 0, "RuntimeError: connection closed by peer", 100, consequence=True)
    directory.rank(0, 1).stderr.write_text("last words\n")
    directory.rank(0, 2).stacks.write_text(STACKS)
    summary = summarize(directory, 0, {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM})
    assert summary is not None and summary.first.rank == 1
    assert summary.first.how == "killed by SIGKILL" and summary.first.traceback == "last words"
    assert summary.others[1].doing == "in all_reduce, called from step (train.py:41)"
    assert summary.others[1].how == "ended by the launcher"


def test_a_rank_that_exits_with_a_code_shows_its_last_lines(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.rank(0, 0).stderr.write_text("".join(f"line {n}\n" for n in range(40)))
    summary = summarize(directory, 0, {0: 3, 1: 0})
    assert summary is not None and summary.first.how == "exit code 3"
    assert summary.first.traceback.splitlines()[-1] == "line 39"
    assert json.loads(json.dumps(summary.as_facts()))["others"] == [
        {"rank": 1, "how": "exit code 0", "message": "", "doing": ""}
    ]


def test_a_rank_that_had_fewer_batches_is_explained(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_error(directory, 0, "PeerFailure: rank 1 left the group", 100, consequence=True)
    summary = summarize(directory, 0, {0: 1, 1: 0})
    assert summary is not None
    assert "rank 1 had finished while rank 0 still waited" in summary.hint and "model.join()" in summary.hint
    assert summary.as_facts()["hint"] == summary.hint


def test_a_kill_from_outside_points_at_memory(tmp_path: Path) -> None:
    summary = summarize(RunDirectory(tmp_path), 0, {0: -signal.SIGKILL, 1: -signal.SIGTERM})
    assert summary is not None and "out of memory" in summary.hint


def test_the_same_mistake_on_every_rank_is_told_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_error(directory, 0, "ConfigError: rank 0: no such device", 100)
    write_error(directory, 1, "ConfigError: rank 1: no such device", 110)
    write_error(directory, 2, "ConfigError: rank 2: another thing", 120)
    summary = summarize(directory, 0, {0: -signal.SIGTERM, 1: 1, 2: 1})
    assert summary is not None and summary.hint == "" and summary.first.how == "raised ConfigError"
    assert [summary.alike(end) for end in summary.others] == [True, False]


def test_no_failure_no_summary(tmp_path: Path) -> None:
    assert summarize(RunDirectory(tmp_path), 0, {0: 0, 1: 0}) is None


def test_a_damaged_record_is_read_as_none(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.rank(0, 0).error.write_text('{"mess')
    summary = summarize(directory, 0, {0: 1})
    assert summary is not None and summary.first.message == "exit code 1"


ENDED_AT_WORK = """
import os, random, signal, threading, time
from phalanx.launch.bootstrap import _dump_stacks_when_ended

def generated(count):
    for number in range(count):
        yield number

def calls(depth): return depth and calls(depth - 1) + sum(generated(3))

def work(begun=None):
    if begun is not None:
        os.write(begun, b".")  # in here, which is what the stack is to show
    while True:
        calls(30)
        exec("def made(): pass\\nfor _ in range(20): made()")
        time.sleep(0)

if __name__ == "__main__":
    ends, (heard, ready) = [], os.pipe()
    for number in range(120):
        if (worker := os.fork()) == 0:
            os.environ["PHALANX_STACKS_FILE"] = f"stacks-{number}"
            _dump_stacks_when_ended()
            for _ in range(2):
                threading.Thread(target=work, daemon=True).start()
            work(ready)
        os.read(heard, 1)
        time.sleep(random.uniform(0.001, 0.02))
        os.kill(worker, signal.SIGTERM)
        ends.append(os.waitpid(worker, 0)[1])
    print(set(ends))
"""


def test_a_rank_whose_threads_are_at_work_ends_by_the_signal_that_told_it_to(tmp_path: Path) -> None:
    done = run_alone(tmp_path, ENDED_AT_WORK)
    assert done.stdout.strip() == f"{{{signal.SIGTERM:d}}}", done.stderr[-2000:]
    for number in range(120):
        assert "work" in [name for _, _, name in read_stacks(tmp_path / f"stacks-{number}")]


FORKING = """
import os, signal
from phalanx.launch.bootstrap import _dump_stacks_when_ended
_dump_stacks_when_ended()
for _ in range(2):
    if (child := os.fork()) == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
"""


def test_what_a_rank_has_forked_does_not_write_where_the_rank_was(tmp_path: Path) -> None:
    done = run_alone(tmp_path, FORKING)
    assert done.stdout.split() == [f"{-signal.SIGTERM:d}", "7"], done.stderr[-2000:]
    assert read_stacks(tmp_path / "stacks") == []


def run_alone(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": SEARCH_PATH, "PHALANX_STACKS_FILE": "stacks"}
    return subprocess.run([sys.executable, "script.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def test_stacks_of_the_main_thread_are_read(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    path.write_text(STACKS)
    assert [name for _, _, name in read_stacks(path)] == ["all_reduce", "wrapper", "step", "<module>"]
    assert read_stacks(tmp_path / "missing") == []


def test_frames_in_words() -> None:
    assert describe([]) == ""
    assert describe([("/home/me/data.py", 5, "load"), ("/home/me/train.py", 9, "main")]) == "in load (data.py:5)"
    stdlib, ours = sysconfig.get_paths()["stdlib"], "/x/site-packages/phalanx/comm/waiter.py"
    users = ("/home/me/train.py", 9, "main")
    inside = [(f"{stdlib}/enum.py", 7, "_missing_"), (ours, 3, "wait"), users]
    assert describe(inside) == "in wait, called from main (train.py:9)"
    assert describe([(f"{stdlib}/queue.py", 7, "get"), users]) == "in get, called from main (train.py:9)"


def test_errors_that_say_a_peer_went_first() -> None:
    assert is_consequence(PeerFailure("rank 1 died", [1]))
    assert is_consequence(CollectiveTimeout("rank 1 silent", [1]))
    assert is_consequence(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:31432"))
    assert not is_consequence(RuntimeError("shape mismatch"))
