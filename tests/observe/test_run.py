"""Reading a run directory back: one clock for all ranks, and damage told apart from absence."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import StateError
from phalanx.observe.run import load
from tests.observe.synthetic import MS, header, training_events, write_run, write_trace


def test_ranks_of_one_boot_are_aligned_exactly_whatever_their_wall_clocks_say(tmp_path: Path) -> None:
    events = [["span", "forward", 7_000 * MS, 7_001 * MS, 1, {}]]
    write_trace(tmp_path, 0, 2, events)
    write_trace(tmp_path, 1, 2, events, wall_ns=header(1, 2)["wall_ns"] + 40_000)
    run = load(tmp_path)
    assert [rank.spans[0].start for rank in run.ranks] == [0, 0]


def test_ranks_of_two_hosts_are_aligned_by_the_wall_clock(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 2, [["span", "forward", 7_000 * MS, 7_001 * MS, 1, {}]])
    # The other host booted later: its clock reads 100 ms at the wall time at which ours reads 5,000 ms.
    write_trace(tmp_path, 1, 2, [["span", "forward", 2_103 * MS, 2_104 * MS, 1, {}]], boot="b", perf_ns=100 * MS)
    run = load(tmp_path)
    assert [rank.spans[0].start for rank in run.ranks] == [0, 3 * MS]


def test_a_line_cut_off_by_a_kill_ends_the_trace_there(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 0, 1, training_events(0, 2))
    text = path.read_text()
    whole = len(load(tmp_path).ranks[0].spans)
    path.write_text(text + '["span","forward",12')
    assert len(load(tmp_path).ranks[0].spans) == whole


def test_the_latest_attempt_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    write_trace(tmp_path / "attempt-1", 0, 1, training_events(0, 1))
    assert len(load(tmp_path).ranks) == 1


def test_the_last_fact_of_a_name_wins(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 1, [["fact", "plan", 0, "old"], ["fact", "plan", 1, "new"]])
    assert load(tmp_path).ranks[0].facts == {"plan": "new"}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: None, "neither run.json nor trace files"),
        (lambda root: (root / "run.json").write_text("{"), "cannot be read"),
        (lambda root: (root / "run.json").write_text("[]"), "should hold an object"),
        (lambda root: (root / "trace-rank00000.jsonl").write_text("hello\n"), "no header"),
        (lambda root: write_trace(root, 0, 1, [], phalanx_trace=99), "version 99"),
        (lambda root: write_trace(root, 0, 1, [["smell", "x", 0]]), "unknown kind 'smell'"),
    ],
)
def test_what_is_not_a_run_is_refused_in_words(tmp_path: Path, prepare, message: str) -> None:  # type: ignore[no-untyped-def]
    prepare(tmp_path)
    with pytest.raises(StateError, match=message):
        load(tmp_path)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no run directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="is a file"):
        load(tmp_path / "file")
