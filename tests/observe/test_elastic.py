"""The report of an elastic run: who was which rank when, and figures that match only ranks that trained together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.observe import perfetto, report
from phalanx.observe.figures.changes import changes, workers_over_time
from phalanx.observe.figures.findings import findings
from phalanx.observe.figures.timeline import timeline
from phalanx.observe.generations import parts
from phalanx.observe.run import load
from phalanx.observe.stats import lateness, loss_progress, startup_ns
from tests.observe.browser import INSTALLED, Browser
from tests.observe.synthetic import MS, header, write_trace

WALL_MS = header(0, 1)["wall_ns"] // MS - 5_000  # when the synthetic clock read 0
PASS_MS = 100


def _passes(start_ms: int, count: int, loss: float, late_ms: int = 0) -> list[list[Any]]:
    events: list[list[Any]] = []
    for at in range(start_ms, start_ms + count * PASS_MS, PASS_MS):
        events.append(["span", "forward", at * MS, (at + 30) * MS, 1, {"samples": 4}])
        events.append(["span", "backward", (at + 30) * MS, (at + 60 + late_ms) * MS, 1, {}])
        events.append(["span", "waiting", (at + 60 + late_ms) * MS, (at + 90) * MS, 1, {}])
        events.append(["scalar", "seen_loss", at * MS, at // PASS_MS, loss])
    return events


def write_elastic(root: Path, traced: bool = True) -> Path:
    """Two ranks train for 10 passes; rank 1 is lost at 7,050 ms; rank 0 goes on alone for 5; worker 2 comes for 8 more."""

    def record(at_ms: float, event: str, **facts: Any) -> str:
        return json.dumps({"at_ns": int((WALL_MS + at_ms) * MS), "event": event, **facts})

    said = {"abandoned": False, "rolled": False, "paused_s": 0.02}
    records = [
        *(record(5_000, "started", worker=worker) for worker in range(2)),
        record(5_900, "forming", generation=1, members=[0, 1], came=[[0, 0.9], [1, 0.9]]),
        record(6_100, "gets on", generation=1, step=1),
        record(7_050, "lost", generation=1, worker=1, rank=1, code=-9),
        record(7_060, "forming", generation=2, members=[0], came=[]),
        record(7_070, "started", worker=2),
        record(7_090, "formed", generation=2, step=10, world=1, **said | {"abandoned": True}),
        record(7_200, "gets on", generation=2, step=11),
        record(7_610, "forming", generation=3, members=[0, 2], came=[[2, 0.54]]),
        record(7_630, "formed", generation=3, step=15, world=2, **said),
        record(7_800, "gets on", generation=3, step=16),
    ]
    root.mkdir(parents=True, exist_ok=True)
    (root / "elastic.jsonl").write_text("\n".join(records) + "\n")
    facts = {"command": ["<b>.py"], "nproc": 2, "state": "finished", "seconds": 4.0, "elastic": [1, 2], "tracing": traced}
    (root / "run.json").write_text(json.dumps(facts | {"started_ns": (WALL_MS + 4_500) * MS}))
    if traced:
        first = _passes(6_000, 10, 3.0) + _passes(7_100, 5, 2.0) + _passes(7_700, 8, 1.0)
        write_trace(root / "attempt-0", 0, 2, first)
        write_trace(root / "attempt-0", 1, 2, _passes(6_000, 10, 5.0, late_ms=20))
        write_trace(root / "attempt-0", 2, 3, _passes(7_700, 8, 2.0, late_ms=10))
    return root


def test_passes_are_matched_among_ranks_that_trained_together(tmp_path: Path) -> None:
    run = load(write_elastic(tmp_path))
    together = [(part.number, [trace.rank for trace in part.ranks]) for part in parts(run)]
    assert together == [(1, [0, 1]), (2, [0]), (3, [0, 2])]
    drawn = timeline(run)
    assert drawn["num_passes"] == 10 + 5 + 8 and drawn["changes"] == [10, 15]
    by_index = {one["index"]: one for one in drawn["passes"]}
    assert [rank["name"] for rank in by_index[9]["ranks"]] == ["rank 0 (worker 0)", "rank 1 (worker 1)"]
    assert by_index[10]["label"] == "generation 2" and len(by_index[10]["ranks"]) == 1
    assert [rank["name"] for rank in by_index[22]["ranks"]] == ["rank 0 (worker 0)", "rank 1 (worker 2)"]
    late = {one.rank: one for one in lateness(run)}
    assert late[1].caused_ns == 10 * 20 * MS and late[2].caused_ns == 8 * 10 * MS and late[0].caused_ns == 0


def test_figures_are_of_those_who_were_there(tmp_path: Path) -> None:
    run = load(write_elastic(tmp_path))
    progress = loss_progress(run)
    assert progress is not None and (progress.first, progress.last) == (4.0, 1.5), "who began, and who is there at last"
    assert startup_ns(run) == 1_500 * MS, "one who came later was not waited for"
    assert not any("No trace of rank" in finding.text for finding in findings(run))
    assert report._curve(run, "seen_loss")[0]["by_step"] is False, "each counts its own backwards"


def test_the_changes_are_told_with_their_times(tmp_path: Path) -> None:
    run = load(write_elastic(tmp_path, traced=False))
    lost, joined = changes(run)
    assert lost.words == ["rank 1 (worker 1) was lost: signal 9 (SIGKILL)", "step 11 was abandoned and is computed again"]
    assert (lost.step, lost.world) == (10, 1)
    assert (lost.at_s, lost.going_on_s, lost.next_step_s) == pytest.approx((2.55, 0.04, 0.15))
    assert joined.words == ["worker 2 joined as rank 1, 0.5 s after its start"] and joined.world == 2
    words = " ".join(finding.text for finding in findings(run))
    assert "1 lost, 1 joined. From a loss to the next committed step it took 0.15 s." in words
    found = workers_over_time(run)
    assert found is not None
    ranks = {one["worker"]: [(bar["generation"], bar["rank"]) for bar in one["bars"]] for one in found["workers"]}
    assert ranks == {0: [(1, 0), (2, 0), (3, 0)], 1: [(1, 1)], 2: [(3, 1)]}
    ends = {one["worker"]: one["end"] and one["end"]["kind"] for one in found["workers"]}
    assert ends == {0: None, 1: "lost", 2: None}


@pytest.mark.parametrize("traced", [True, False])
def test_the_page_and_the_perfetto_file_tell_of_them(tmp_path: Path, traced: bool) -> None:
    run = load(write_elastic(tmp_path, traced))
    page = report.render(run)
    for words in ("Who came and went", "was lost: signal 9 (SIGKILL)", "1 to 2 ranks, 3 workers in all"):
        assert words in page
    named = [event["name"] for event in perfetto.events(run) if event["ph"] == "i"]
    assert any("was lost" in name for name in named) == traced


def test_runs_says_what_became_of_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_elastic(tmp_path / "20260101-000000-x", traced=False)
    with pytest.raises(SystemExit):
        main(["runs", "--run-dir", str(tmp_path)])
    assert "elastic: 1 lost, 1 joined" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["top", "--once", str(tmp_path / "20260101-000000-x")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rank worker pid step" in shown and "2.5 s rank 1 (worker 1) was lost: signal 9 (SIGKILL)" in shown


if INSTALLED:

    @pytest.mark.thorough  # a browser of its own
    @pytest.mark.timeout(60)
    @pytest.mark.allow_leaks("children")
    def test_the_picture_is_drawn_at_any_width(tmp_path: Path) -> None:
        page = report.write(load(write_elastic(tmp_path)), tmp_path / "report.html")
        with Browser() as browser:
            for width in (1300, 420):
                browser.resize(width, 1000)
                browser.open(page)
                bars = "[...document.querySelectorAll('#workers rect.member')]"
                drawn = browser.run(f"return {bars}.map(r => r.dataset.words)")
                assert len(drawn) == 5 and "worker 2 was rank 1" in drawn[-1]
                assert browser.run("return document.querySelectorAll('#workers .gone.lost').length") == 1
                assert browser.run("return document.querySelectorAll('#lengths .change').length") == 2
                assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
                assert [entry for entry in browser.console() if entry["level"] in ("SEVERE", "WARNING")] == []
