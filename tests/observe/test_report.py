"""What the report says, without a browser: findings, figures, other tools' files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.observe import perfetto, report, tensorboard
from phalanx.observe.findings import findings
from phalanx.observe.run import load
from phalanx.observe.timeline import MOST_PASSES, MOST_RANKS, timeline
from tests.observe.synthetic import MS, write_run, write_trace


def said(root: Path) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings(load(root))]


def test_a_straggler_is_named_with_what_to_look_for(tmp_path: Path) -> None:
    words = said(write_run(tmp_path, world=3, late_rank=2))
    level, text = words[0]
    assert level == "warn" and "Rank 2 kept the others waiting" in text and "6.0 ms late" in text


def test_an_even_run_is_said_to_be_even(tmp_path: Path) -> None:
    assert ("good", "No rank kept the others waiting.") in said(write_run(tmp_path))


def test_a_failure_comes_first_with_its_words_and_traceback(tmp_path: Path) -> None:
    write_run(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text()) | {
        "state": "failed",
        "failure": {
            "rank": 1,
            "how": "exit code 1",
            "message": "ValueError: <b>label</b> 7",
            "traceback": 'File "train.py", line 3',
            "others": [{"rank": 0, "how": "killed by SIGTERM", "message": "", "doing": "in all_reduce"}],
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    level, text = said(tmp_path)[0]
    assert level == "bad" and text.startswith("Rank 1 failed first (exit code 1): ValueError")
    page = report.render(load(tmp_path))
    assert "&lt;b&gt;label" in page and "<b>label" not in page
    assert "in all_reduce" in page and "train.py&#34;, line 3" in page


def test_warnings_are_counted_over_ranks(tmp_path: Path) -> None:
    event = ["instant", "warning", 1, 1, {"text": "UserWarning: slow"}]
    write_trace(tmp_path, 0, 2, [event, event])
    write_trace(tmp_path, 1, 2, [event])
    assert ("warn", "Warning on 2 ranks, 3 times: UserWarning: slow") in said(tmp_path)


def test_a_loss_that_is_not_a_number_and_a_missing_rank_are_told(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 2, [["scalar", "loss", 1, 7, float("nan")]])
    words = dict(said(tmp_path))
    assert words["bad"] == "The loss of rank 0 became nan at step 7."
    assert "No trace of rank 1 of 2" in words["warn"]
    report.render(load(tmp_path))


def test_an_untraced_run_still_gets_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": ["a.py"], "nproc": 2, "state": "finished"}))
    page = report.render(load(tmp_path))
    assert "phalanx run --trace" in page


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, num_steps=30))
    figures = {name: value for name, value, _ in report.tiles(run)}
    assert figures["Typical pass"] == "37.0 ms" and figures["Hidden"] == "71%"
    assert figures["Duration"] == "12.5 s" and figures["Loss"] == f"{4 / 3.9:.3f}"


def test_the_page_names_the_parameters_of_each_bucket(tmp_path: Path) -> None:
    page = report.render(load(write_run(tmp_path)))
    assert "head.bias, head.weight" in page and "embed.weight" in page


def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = report.render(load(write_run(tmp_path)))
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", ours)


def test_text_that_would_end_the_script_stays_data(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 1, [["scalar", "a/b", 1, 0, 1.0], ["instant", "warning", 1, 1, {"text": "</script><i>"}]])
    page = report.render(load(tmp_path))
    assert "</script><i>" not in page and "&lt;/script&gt;" in page


def test_long_runs_and_large_worlds_are_thinned(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, world=20, num_steps=100))
    drawn = timeline(run)
    assert len(drawn["passes"]) <= MOST_PASSES and drawn["num_passes"] == 100
    assert len(drawn["passes"][0]["ranks"]) == MOST_RANKS and drawn["left_out_ranks"] == 4
    assert {"first", "last"} <= {one["label"] for one in drawn["passes"]}
    assert {drawn["passes"][0]["ranks"][0]["rank"], drawn["passes"][0]["ranks"][-1]["rank"]} == {0, 19}


def test_a_filled_bucket_is_marked_when_only_the_reduction_says_so(tmp_path: Path) -> None:
    events = [
        ["span", "forward", 0, 1 * MS, 1, {}],
        ["span", "backward", 1 * MS, 9 * MS, 1, {}],
        ["span", "reduce", 5 * MS, 8 * MS, 2, {"bucket": 0, "ready_ns": 4 * MS}],
    ]
    write_trace(tmp_path, 0, 1, events)
    assert timeline(load(tmp_path))["passes"][0]["ranks"][0]["filled"] == [[4.0, 0]]


def test_perfetto_rows_hold_no_crossing_spans(tmp_path: Path) -> None:
    events = [
        ["span", "reduce", 0, 10 * MS, 2, {"bucket": 0}],
        ["span", "reduce", 5 * MS, 15 * MS, 2, {"bucket": 1}],
        ["span", "backward", 0, 12 * MS, 1, {}],
        ["scalar", "loss", 12 * MS, 0, 2.0],
    ]
    write_trace(tmp_path, 0, 1, events)
    path = perfetto.export(load(tmp_path), tmp_path / "perfetto.json")
    found = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in found if event["ph"] == "X"]
    reduces = [event for event in complete if event["cat"] == "reduce"]
    assert {event["name"] for event in reduces} == {"reduce 0", "reduce 1"}
    assert len({event["tid"] for event in reduces}) == 2
    assert next(event for event in complete if event["name"] == "backward")["dur"] == 12_000
    assert next(event for event in found if event["ph"] == "C")["args"] == {"value": 2.0}


def test_tensorboard_is_written_or_its_absence_told(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "run", num_steps=4))
    try:
        import tensorboard as installed  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            tensorboard.export(run, tmp_path / "board")
    else:
        assert tensorboard.export(run, tmp_path / "board") == 2 * 4 * 3
        assert list((tmp_path / "board" / "rank-00001").iterdir())
