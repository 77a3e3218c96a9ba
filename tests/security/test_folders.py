"""A run folder made by an enemy: the commands that look at runs neither hang, nor write elsewhere, nor obey its name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.console import visible
from phalanx.cli.main import cli
from phalanx.errors import PhalanxError, StateError
from phalanx.launch import rundir
from phalanx.launch.elastic.story import Story
from phalanx.launch.records.runs import list_runs
from phalanx.launch.rundir import RunDirectory
from phalanx.observe import run
from tests.observe.synthetic import training_events, write_trace

pytestmark = pytest.mark.timeout(60)

TITLE = "20200101-\x1b]0;taken\x07\x1b[2J"


def make_run(folder: Path, name: str = "run", **facts: Any) -> Path:
    made = folder / name
    (made / "attempt-0" / "rank-00000").mkdir(parents=True)
    known = {"state": "running", "nproc": 1, "pid": os.getpid(), "host": socket.gethostname(), **facts}
    (made / "run.json").write_text(json.dumps(known))
    return made


@pytest.fixture(autouse=True)
def ends_soon() -> Iterator[None]:
    """A pipe that nobody writes to is waited for in the kernel, where pytest's own limit comes late."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def phalanx(*arguments: str, answer: str = "") -> str:
    done = CliRunner().invoke(cli, arguments, input=answer, standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, click.Abort):
        raise done.exception
    return done.output


def test_top_does_not_wait_for_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(make_run(tmp_path) / "attempt-0" / "rank-00000" / "status.json")
    assert "running" in phalanx("top", "--once", str(tmp_path / "run"))


@pytest.mark.parametrize("command", [("top", "--once", "--runs"), ("runs", "--clean", "--keep", "0", "--run-dir")])
def test_the_name_of_a_run_does_nothing_to_the_terminal(tmp_path: Path, command: tuple[str, ...]) -> None:
    make_run(tmp_path, TITLE, state="finished")
    said = phalanx(*command, str(tmp_path), answer="n\n")
    assert visible(TITLE) in said and "\x1b]" not in said and "\x1b[2J" not in said


def test_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path, os.fsdecode(b"20200101-\xff\x9b2J"), state="finished")
    assert "20200101-\\xff\\x9b2J" in phalanx("runs", "--run-dir", str(tmp_path))


@pytest.mark.parametrize("seconds", [10**400, float("nan"), True, "x"])
def test_one_record_does_not_keep_the_others_from_being_listed(tmp_path: Path, seconds: Any) -> None:
    make_run(tmp_path, "20200101-enemy", state="finished", seconds=seconds)
    make_run(tmp_path, "20200102-mine", state="finished", seconds=7)
    assert "20200102-mine" in phalanx("runs", "--run-dir", str(tmp_path))


@pytest.mark.parametrize("what", ["moment", "attempt"])
def test_nor_does_a_number_that_is_none(tmp_path: Path, what: str) -> None:
    enemy, mine = (make_run(tmp_path, name, elastic=[1, 4]) for name in ("20200101-enemy", "20200102-mine"))
    if what == "moment":
        (enemy / "elastic.jsonl").write_text('{"event": "scale", "wanted": 2, "at_ns": Infinity}\n')
    else:
        (enemy / "attempt-²").mkdir()
    assert mine.name in phalanx("runs", "--run-dir", str(tmp_path))
    assert "running" in phalanx("top", "--once", str(enemy))


def test_of_a_run_that_is_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    elsewhere, here = make_run(tmp_path / "elsewhere", state="finished"), tmp_path / "here"
    here.mkdir()
    (here / "20200101-link").symlink_to(elsewhere)
    phalanx("runs", "--clean", "--keep", "0", "-y", "--run-dir", str(here))
    assert not list(here.iterdir()) and (elsewhere / "run.json").exists()


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_scale_writes_through_nothing_that_lies_there(tmp_path: Path, what: str) -> None:
    folder, precious = make_run(tmp_path, elastic=[1, 4]), tmp_path / "precious"
    precious.write_text("keep me")
    for name in (f".scale.{os.getpid()}", "scale"):
        (folder / name).symlink_to(precious) if what == "link" else os.mkfifo(folder / name)
    phalanx("scale", str(folder), "2")
    assert precious.read_text() == "keep me" and (folder / "scale").read_text() == "2"
    assert (folder / "scale").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("limits", ["x", "xy", 5, [1], [1, "b"], [None, None], {"a": 1, "b": 2}])
def test_scale_refuses_a_record_that_no_run_writes(tmp_path: Path, limits: Any) -> None:
    with pytest.raises(StateError, match="its record says elastic"):
        phalanx("scale", str(make_run(tmp_path, elastic=limits)), "1")


def test_scale_knows_whom_it_asks(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="there is no run in"):
        phalanx("scale", str(tmp_path), "1")
    dead = make_run(tmp_path, elastic=[1, 4], pid=2**22 + 5)
    with pytest.raises(PhalanxError, match=r"has ended \(launcher gone\)"):
        phalanx("scale", str(dead), "2")


def test_a_file_that_is_all_holes_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rundir, run):
        monkeypatch.setattr(module, "LONGEST", 1 << 20)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "run.json").touch()
    os.truncate(tmp_path / "big" / "run.json", 1 << 38)
    with pytest.raises(StateError, match="longer than 1 MiB"):
        RunDirectory(tmp_path / "big").facts()
    write_trace(tmp_path / "trace", 0, 1, training_events(0, 2))
    (trace,) = (tmp_path / "trace").glob("trace-rank*")
    before = run.load(tmp_path / "trace")
    os.truncate(trace, 1 << 38)
    assert run.load(tmp_path / "trace") == before


def test_a_machine_that_says_brackets_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "[/x] \x1b]0;taken\x07")
    said = phalanx("doctor", "--no-self-test")
    assert "OMP_NUM_THREADS is '[/x]" in said and "\x1b]0" not in said


@pytest.mark.parametrize("name", ["run.json", "elastic.jsonl", "attempt-0/trace-rank00000.jsonl"])
def test_what_was_a_file_a_moment_ago_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = make_run(tmp_path, elastic=[1, 4])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    monkeypatch.setattr(Path, "is_file", lambda self: True)  # as whoever swaps it lets us see it
    with pytest.raises(StateError, match="not a plain file") if name != "elastic.jsonl" else contextlib.nullcontext():
        run.load(folder)


def test_folders_without_end_keep_no_other_run_from_being_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enemy, mine = (make_run(tmp_path, name, state="finished") for name in ("20200101-enemy", "20200102-mine"))
    monkeypatch.chdir(enemy)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(tmp_path)
    try:
        assert mine.name in phalanx("runs", "--run-dir", str(tmp_path))
        said = phalanx("runs", "--clean", "--keep", "0", "-y", "--run-dir", str(tmp_path))
        assert f"{enemy} cannot be removed: its folders are too deep" in said and "removed 1 run of 2" in said
        assert not mine.exists()
    finally:
        subprocess.run(["rm", "-r", str(enemy)], check=True)  # pytest could not


def test_a_record_that_would_fill_the_memory_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": [%s{}]}' % ("{}," * (6 << 20)))
    tracemalloc.start()
    with pytest.raises(StateError, match="it is longer than 16 MiB"):
        RunDirectory(tmp_path).facts()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 26


_MANY = 40_000
_FORMING: dict[str, Any] = {"event": "forming", "at_ns": 0, "generation": 1, "members": [], "came": []}
_FORMED = {"event": "formed", "at_ns": 0, "generation": _MANY, "step": 1, "rolled": 0, "abandoned": 0, "paused_s": 0}
_LARGE: dict[str, Any] = _FORMING | {"members": [*range(_MANY)]}
LONG_STORIES: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "ends of workers that nobody knows": lambda: (
        one
        for number in range(_MANY)
        for one in (_FORMING | {"generation": number}, {"event": "ended", "at_ns": 0, "worker": number, "code": 1})
    ),
    "generations that are formed again and again": lambda: (
        one for number in range(_MANY + 1) for one in (_FORMING | {"generation": number}, _FORMED)
    ),
    "signals to one of many": lambda: [_LARGE, *_MANY * [{"event": "woken", "at_ns": 0, "worker": 1}]],
    "losses of nobody among many": lambda: [_LARGE, *_MANY * [{"event": "lost", "at_ns": 0, "worker": -1, "code": 1}]],
    "many who come": lambda: [
        *2 * [_LARGE | {"generation": _MANY, "came": [[one, 1.0] for one in range(_MANY)]}],
        _FORMED,
    ],
}


@pytest.mark.parametrize("kind", LONG_STORIES)
def test_an_event_takes_no_longer_after_many_others(kind: str) -> None:
    story = Story()
    for record in LONG_STORIES[kind]():
        story.add(record)
    assert story.generations


def test_long_records_of_many_runs_do_not_fill_the_memory_together(tmp_path: Path) -> None:
    for number in range(8):
        make_run(tmp_path, f"2020010{number}-enemy", state="finished", more=[[]] * (1 << 14), nproc=[[]] * (1 << 14))
    make_run(tmp_path, "20200109-mine", state="finished", nproc=7)
    tracemalloc.start()
    found = list_runs(tmp_path)
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 1 << 19 and len(found) == 9
    assert (found[0].facts["nproc"], found[0].state, found[1].state) == (7, "finished", "finished")
