"""Runs that are kept: listing them, finding the newest, watching one, removing old ones."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.cli.status_line import StatusLine
from phalanx.comm.failure.processes import identity
from phalanx.launch.records import status
from phalanx.launch.records.runs import list_runs, newest
from phalanx.launch.records.status import RankStatus
from phalanx.launch.rundir import RunDirectory
from tests.observe.synthetic import write_run


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def make_run(parent: Path, name: str, days_old: float = 0.0, **facts: Any) -> Path:
    root = parent / name
    root.mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"state": "finished", "nproc": 2, "seconds": 3.0, **facts}))
    when = time.time() - 86400 * days_old
    os.utime(root / "run.json", (when, when))
    return root


def test_runs_are_listed_newest_first_with_how_they_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "20260101-000000-old", state="failed")
    make_run(tmp_path, "20260102-000000-new", tracing=True)
    make_run(tmp_path, "20260103-000000-gone", state="running", pid=2**22 + 1, host=socket.gethostname())
    (tmp_path / "not-a-run").mkdir()
    assert ended("runs", "--run-dir", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0].rsplit("-", 1)[1] for line in lines] == ["gone", "new", "old"]
    assert "launcher gone" in lines[0] and "traced" in lines[1] and "failed" in lines[2]
    assert newest(tmp_path).path.name.endswith("gone") and newest(tmp_path, traced=True).path.name.endswith("new")


def test_cleaning_keeps_the_newest_the_young_and_what_still_runs(tmp_path: Path) -> None:
    for day in range(1, 6):
        make_run(tmp_path, f"2026010{day}-000000-x", days_old=10 - day)
    make_run(tmp_path, "20250101-000000-alive", 99, state="running", pid=os.getpid(), host=socket.gethostname())
    assert ended("runs", "--run-dir", str(tmp_path), "--clean", "--older-than", "7.5", "-y") == 0
    assert sorted(run.path.name[:8] for run in list_runs(tmp_path)) == ["20250101", "20260103", "20260104", "20260105"]
    assert ended("runs", "--run-dir", str(tmp_path), "--clean", "--keep", "1", "-y") == 0
    assert sorted(run.path.name[:8] for run in list_runs(tmp_path)) == ["20250101", "20260105"]


def test_cleaning_asks_and_needs_to_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "20260101-000000-x")
    assert ended("runs", "--run-dir", str(tmp_path), "--keep", "0") == 2
    assert "Add --clean" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # nobody answers
    assert ended("runs", "--run-dir", str(tmp_path), "--clean", "--keep", "0") == 130
    assert len(list_runs(tmp_path)) == 1


def test_report_without_an_argument_takes_the_newest_traced_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, tracing in (("20260101-000000-a", True), ("20260102-000000-b", True), ("20260103-000000-c", False)):
        root = write_run(tmp_path / "runs" / name, num_steps=3)
        facts = json.loads((root / "run.json").read_text())
        (root / "run.json").write_text(json.dumps(facts | {"tracing": tracing}))
    assert ended("report") == 0
    said = capsys.readouterr()
    assert said.out.strip() == "runs/20260102-000000-b/report.html"
    # Whoever asks after a failure means the last run, traced or not.
    assert "phalanx report runs/20260103-000000-c" in said.err
    assert ended("report", "runs/20260101-000000-a") == 0 and "newest" not in capsys.readouterr().err


def pulse(rank: int, **changes: Any) -> dict[str, Any]:
    values = {"state": "computing", "for_s": 0.1, "step": 40, "steps_per_s": 20.0, "waiting": 0.3, "samples_per_s": 640.0}
    return {"rank": rank, **values, "loss": 0.5, "resident": 3e8, "wall_s": time.time(), **changes}


def with_pulses(root: Path, *pulses: dict[str, Any]) -> RunDirectory:
    directory = RunDirectory(root)
    for one in pulses:
        path = directory.rank(0, one["rank"]).status
        path.write_text(json.dumps(one).ljust(512))
    return directory


def test_the_line_names_the_slowest_and_whom_all_wait_for(tmp_path: Path) -> None:
    directory = with_pulses(make_run(tmp_path, "a"), pulse(0), pulse(1, waiting=0.01, loss=0.7))
    line = status.line(status.read(directory), 2)
    assert line == "step 40 · 20 steps/s · 1,280 samples/s · loss 0.6 · slowest: rank 1 · 300 MB at most"
    stuck = with_pulses(
        make_run(tmp_path, "b"), pulse(0, state="waiting", for_s=9.2, steps_per_s=0.0), pulse(1, steps_per_s=0.0, for_s=9.3)
    )
    assert "waiting for rank 1 since 9 s" in status.line(status.read(stuck), 2)
    assert status.line([], 2) == "starting"
    alone = [RankStatus(**pulse(0, step=0, steps_per_s=0.0, samples_per_s=0.0, loss=None))]
    assert status.line(alone, 4) == "no step yet · 1 of 4 ranks up · 300 MB at most"
    assert status.slowest([RankStatus(**pulse(0)), RankStatus(**pulse(1, waiting=0.28))]) is None


def test_top_shows_a_line_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run(tmp_path, "20260101-000000-t", state="running", pid=os.getpid(), host=socket.gethostname())
    with_pulses(root, pulse(0, state="waiting", for_s=30.0), pulse(1, for_s=31.0), pulse(2, wall_s=time.time() - 60))
    assert ended("top", "--once", str(root)) == 0
    said = capsys.readouterr().out
    assert "running" in said and "waiting for rank 1, 2 since 30 s" in said
    assert "the others wait for" in " ".join(said.split()) and "silent for 60 s" in said
    assert ended("top", str(tmp_path)) == 2 and "is no run directory" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_line_gives_way_to_every_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = with_pulses(make_run(tmp_path, "a"), pulse(0))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("phalanx.cli.status_line._REDRAW_S", 0.01)
    line = StatusLine(directory, 1, wanted=True)
    line.start()
    deadline = time.monotonic() + 10
    while "step 40" not in terminal.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    line.echo("0 │ said by the script", err=False)
    line.stop()
    line.stop()
    pieces = terminal.getvalue().split("\r\x1b[2K")
    assert "0 │ said by the script\n" in pieces, "alone on its line, after the status was taken away"
    assert pieces[-1] == "" or "step" not in pieces[-1], "nothing is left at the end"


def test_no_status_line_where_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = with_pulses(make_run(tmp_path, "a"), pulse(0))
    plain = io.StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    monkeypatch.setattr("phalanx.cli.status_line._REDRAW_S", 0.01)
    monkeypatch.setattr("phalanx.cli.status_line._PLAIN_EVERY_S", 0.05)
    line = StatusLine(directory, 1, wanted=True)
    line.start()
    deadline = time.monotonic() + 10
    while not plain.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    line.stop()
    assert "\x1b[2K" not in plain.getvalue() and plain.getvalue().startswith("phalanx: step 40 · ")


def make_status(run: Path, **changes: Any) -> None:
    folder = run / "attempt-0" / "rank-00000"
    folder.mkdir(parents=True)
    numbers = {"rank": 0, "for_s": 1, "step": 3, "steps_per_s": 1, "waiting": 0.1, "samples_per_s": 1, "resident": 1}
    record = {**numbers, "state": "computing", "loss": None, "wall_s": time.time(), **changes}
    (folder / "status.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("facts", "said", "message"),
    [
        ({"nproc": "two"}, {}, "is malformed"),
        ({"nproc": None}, {}, "is malformed"),
        ({"nodes": 5}, {}, "is malformed"),
        ({}, {"resident": 10**400}, "is malformed"),
        ({}, {"state": "[/red] \x1b[2J"}, ""),
        ({"state": "running", "pid": 10**30, "host": socket.gethostname()}, {}, ""),
    ],
)
def test_a_folder_that_holds_what_no_run_writes_is_told_of_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, Any], said: dict[str, Any], message: str
) -> None:
    run = make_run(tmp_path, "20260101-000000-foreign", **facts)
    make_status(run, **said)
    assert ended("runs", "--run-dir", str(tmp_path)) == 0, "one such folder does not hide the others"
    assert ended("top", "--once", str(run)) == (2 if message else 0)
    seen = capsys.readouterr()
    assert message in seen.err and "\x1b[2J" not in seen.out


def test_a_process_that_has_the_launchers_number_is_not_taken_for_it(tmp_path: Path) -> None:
    here = {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}
    make_run(tmp_path, "20260102-000000-mine", **here, process=identity())
    make_run(tmp_path, "20260101-000000-other", **here, process={**identity(), "began": "1"})
    assert [run.state for run in list_runs(tmp_path)] == ["running", "launcher gone"]
