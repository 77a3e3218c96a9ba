"""What the report says, without a browser: findings, figures, other tools' files."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import ConfigError
from phalanx.observe import perfetto, report, tensorboard
from phalanx.observe.figures.findings import findings
from phalanx.observe.figures.memory import memory_rows
from phalanx.observe.figures.timeline import MOST_PASSES, MOST_RANKS, timeline
from phalanx.observe.run import load
from phalanx.observe.stats import Progress, lateness, loss_progress
from tests.observe.synthetic import MS, write_run, write_trace


def said(root: Path) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings(load(root))]


def test_a_straggler_is_named_with_what_to_look_for(tmp_path: Path) -> None:
    words = said(write_run(tmp_path, world=3, late_rank=2))
    level, text = words[0]
    # 30 passes, 6 ms each, two ranks that wait; a pass takes 43 ms.
    assert level == "warn" and "Rank 2 kept the others waiting for 0.36 s, 14% of their time" in text
    assert "last to finish backward in 100% of passes" in text


def test_an_even_run_is_said_to_be_even(tmp_path: Path) -> None:
    even = "No rank kept the others waiting for long: the most was 0.0% of their time."
    assert ("good", even) in said(write_run(tmp_path))


def test_blame_goes_by_the_time_caused_not_by_how_often(tmp_path: Path) -> None:
    """Rank 0 is last in most passes, by a little; rank 1 in few, by much. Chart and words name the same one."""
    for rank in range(2):
        events: list[list[object]] = []
        for k in range(40):
            late = 0.2 if rank == 0 and k % 4 else 15.0 if rank == 1 and k % 4 == 0 else 0.0
            start = k * 60
            events.append(["span", "backward", start * MS, int((start + 20 + late) * MS), 1, {}])
            events.append(["span", "waiting", int((start + 20 + late) * MS), (start + 40) * MS, 1, {}])
        write_trace(tmp_path, rank, 2, events)
    run = load(tmp_path)
    often, seldom = lateness(run)
    assert often.share_last == 0.75 and seldom.share_last == 0.25 and seldom.caused_ns > 20 * often.caused_ns
    assert "Rank 1 kept the others waiting" in " ".join(text for level, text in said(tmp_path) if level == "warn")


def test_ranks_that_wait_for_each_other_in_turns_are_not_blamed(tmp_path: Path) -> None:
    for rank in range(2):
        ends = [[k * 60, k * 60 + (30 if k % 2 == rank else 20)] for k in range(20)]
        write_trace(tmp_path, rank, 2, [["span", "backward", a * MS, b * MS, 1, {}] for a, b in ends])
    assert any(level == "info" and "in turns" in text for level, text in said(tmp_path))


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


@pytest.mark.parametrize(("name", "shift", "told"), [("seen_loss", 0.0, 1), ("seen_loss", 0.1, 0), ("loss", 0.0, 0)])
def test_ranks_that_train_on_the_same_data_are_told(tmp_path: Path, name: str, shift: float, told: int) -> None:
    for rank in range(2):
        write_trace(tmp_path, rank, 2, [["scalar", name, k, k, 5.0 - k + shift * rank] for k in range(4)])
    assert sum("all train on the same data" in text for _, text in said(tmp_path)) == told


def test_an_untraced_run_still_gets_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": ["a.py"], "nproc": 2, "state": "finished"}))
    for number, text in enumerate(("step 1\nstep 2\n", "")):
        folder = tmp_path / "attempt-0" / f"rank-{number:05d}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(text)
        (folder / "stderr.log").symlink_to("/etc/hostname")
        pulse = {"rank": number, "state": "ended", "for_s": 0, "step": 41 + number, "steps_per_s": 8.0, "waiting": 0}
        pulse |= {"samples_per_s": 0, "loss": None, "resident": 3e8, "wall_s": 1.0}
        (folder / "status.json").write_text(json.dumps(pulse if number == 0 else pulse | {"step": "<b>"}))
    assert ("Steps", "41", "8 steps/s in the last seconds") in report.tiles(load(tmp_path)), "what is no number is left out"
    page = report.render(load(tmp_path))
    assert "phalanx run --trace" in page
    assert "rank 0, stdout" in page and "step 1\nstep 2" in page, "the last lines of output"
    assert "rank 1" not in page and "stderr" not in page, "nothing of empty files, and nothing through links"


def test_a_script_whose_name_is_no_text_gets_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": [os.fsdecode(b"gr\xfcn.py")], "state": "finished"}))
    page = report.write(load(tmp_path), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>gr?n.py" in page


def test_what_the_script_does_not_say_is_seen_or_asked_for(tmp_path: Path) -> None:
    spans = [["span", "forward", k * 10 * MS, (k * 10 + 3) * MS, 1, {"samples": 8}] for k in range(20)]
    spans += [["span", "backward", (k * 10 + 3) * MS, (k * 10 + 9) * MS, 1, {}] for k in range(20)]
    write_trace(tmp_path, 0, 1, spans)
    asked = " ".join(text for _, text in said(tmp_path))
    assert 'trace.scalar("loss", step, loss.item())' in asked and "tokens_per_s" not in asked
    assert dict((name, value) for name, value, _ in report.tiles(load(tmp_path)))["Throughput"] == f"{8 / 0.0099:,.0f}"
    write_trace(tmp_path, 0, 1, [*spans, *(["scalar", "seen_loss", k * 10 * MS, k, 5.0 - 0.1 * k] for k in range(20))])
    run = load(tmp_path)
    assert 'trace.scalar("loss"' not in " ".join(text for _, text in said(tmp_path))
    assert loss_progress(run) == Progress(5.0, pytest.approx(4.05))
    assert "as seen: what backward was called on" in report.render(run)


def test_the_loss_that_one_rank_says_is_not_mixed_with_what_is_seen_of_the_others(tmp_path: Path) -> None:
    """Under a GradScaler `backward` is called on the loss times 65536, and on the first rank alone the script says it."""
    seen = [["scalar", "seen_loss", k, k, 65536.0 * (4 - k)] for k in range(3)]
    write_trace(tmp_path, 0, 2, [*seen, *(["scalar", "loss", k, k, 4.0 - k] for k in range(3))])
    write_trace(tmp_path, 1, 2, [*seen, ["scalar", "seen_loss", 3, 3, float("inf")]])
    assert loss_progress(load(tmp_path)) == Progress(4.0, 3.0)
    assert not [text for _, text in said(tmp_path) if "became inf" in text]


def test_start_up_is_from_the_launch_to_the_last_first_forward(tmp_path: Path) -> None:
    root = write_run(tmp_path, num_steps=3)
    facts = json.loads((root / "run.json").read_text())
    # The traces begin at 6 s of a clock that reads 5 s at this wall time.
    (root / "run.json").write_text(json.dumps(facts | {"started_ns": 1_700_000_000_000 * MS - 2_500 * MS}))
    tiles = {name: value for name, value, _ in report.tiles(load(root))}
    assert tiles["Start-up"] == "3.5 s"


def test_shards_that_do_not_say_how_large_the_whole_is_are_added_up(tmp_path: Path) -> None:
    for rank in range(2):
        memory = {"state": 10 + rank, "gradients": 4, "parameters": 4, "sharded": True}
        write_trace(tmp_path, rank, 2, [["fact", "memory", 1, memory]])
    rows = memory_rows(load(tmp_path))
    assert [kinds["unsharded_state"] for _, kinds in rows] == [21.0, 21.0]


def test_a_report_is_small(tmp_path: Path) -> None:
    page = report.render(load(write_run(tmp_path, world=16, num_steps=200)))
    assert len(page.encode()) < 1_500_000


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, num_steps=30))
    figures = {name: value for name, value, _ in report.tiles(run)}
    assert figures["Typical pass"] == "37.0 ms" and figures["Hidden"] == "71%"
    # The mean of both ranks and of the last twenty steps, as everywhere.
    last = sum(4.0 / (1 + 0.1 * step) for step in range(10, 30)) / 20 + 0.005
    assert figures["Duration"] == "12.5 s" and figures["Loss"] == f"{last:.3f}"
    assert figures["Throughput"] == f"{2 * (1000 + 7 * 22):,.0f}"


def test_the_typical_pass_of_the_figures_is_the_one_that_is_drawn(tmp_path: Path) -> None:
    """Ranks and passes of unequal lengths: one definition, whichever place of the page shows it."""
    for rank in range(3):
        spans, at = [], 0
        for number in range(6):
            length = (10 + 7 * number % 5 + 3 * rank * (number % 2)) * MS
            spans += [["span", "forward", at, at + MS, 1, {}], ["span", "backward", at + MS, at + length, 1, {}]]
            at += length + MS
        write_trace(tmp_path, rank, 3, spans)
    run = load(tmp_path)
    (typical,) = [one for one in timeline(run)["passes"] if one["label"] == "typical"]
    shown = {name: value for name, value, _ in report.tiles(run)}
    assert shown["Typical pass"] == f"{typical['length']:.1f} ms"
    assert [typical["index"], typical["length"]] in timeline(run)["lengths"]


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


def test_a_loss_that_is_not_a_number_leaves_perfetto_a_file_that_it_can_read(tmp_path: Path) -> None:
    write_trace(
        tmp_path,
        0,
        1,
        [
            ["span", "data", 0, MS, 1, {"scale": float("inf")}],
            ["scalar", "loss", 1 * MS, 0, 2.0],
            ["scalar", "loss", 2 * MS, 1, float("nan")],
        ],
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = perfetto.export(load(tmp_path), tmp_path / "perfetto.json")
    found = json.loads(path.read_text(), parse_constant=refuse)["traceEvents"]
    assert [event["args"] for event in found if event["ph"] in "CX"] == [{"scale": "Infinity"}, {"value": 2.0}]


def test_tensorboard_gets_each_point_at_its_own_moment_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a rank that began later than the run: its file's clock readings are of another moment."""
    points: list[tuple[str, int, float]] = []

    class Writer:
        def __init__(self, folder: str) -> None: ...

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *exception: object) -> None: ...

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            points.append((name, step, walltime))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    first = [["scalar", "a", 1_000 * MS, None, 1.0], ["scalar", "b", 2_000 * MS, None, 1.0]]
    write_trace(tmp_path, 0, 2, [*first, ["scalar", "a", 3_000 * MS, None, 1.0]], perf_ns=0, wall_ns=50_000 * MS)
    write_trace(tmp_path, 1, 2, [["scalar", "a", 9_000 * MS, 7, 1.0]], perf_ns=8_000 * MS, wall_ns=58_000 * MS)
    assert tensorboard.export(load(tmp_path), tmp_path / "board") == 4
    assert points == [("a", 0, 51.0), ("b", 0, 52.0), ("a", 1, 53.0), ("a", 7, 59.0)]


def test_a_trace_that_was_cut_off_before_its_header_is_a_missing_one(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=2)
    (trace_file,) = tmp_path.rglob("trace-rank00001.jsonl")
    trace_file.write_text("")
    run = load(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0]
    assert "No trace of rank 1 of 2" in report.render(run)


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
