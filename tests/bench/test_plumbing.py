"""What benchmarks are made of: fair turns, ratios, and results that can be read back."""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from bench import ddp, peers
from bench.measure import Samples, Weighing, interleave, ratio
from bench.models import CASES, SIZES
from bench.plot import draw
from bench.summary import newest, read, write
from bench.table import Result, Row, save, show
from phalanx.cli.bench import NAMES


def result() -> Result:
    rows = [
        Row("fast", 1.0, 2.0, 0.5, 0.45, 0.55, target=0.6),
        Row("slow", 3.0, 2.0, 1.5, 1.4, 1.6),
        Row("short", 1.8, 2.0, 0.9, 0.85, 0.95, target=0.5),
        Row.of_rates("many", 9.0, 3.0, (3.0, 2.5, 3.5), target=1 / 1.2),
    ]
    return Result("sample", "Is it quick?", "phalanx", "torch", rows, notes=["a note"])


def test_contenders_take_turns_and_every_one_leads_once() -> None:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = interleave(steps, num_rounds=3, steps_a_round=1, before_block=lambda: order.append("|"))
    blocks = "".join(order).split("|")[1:]
    assert len(blocks) == 3 * (3 + 1)
    assert {blocks[index] for index in (3, 6, 9)} == {"a", "b", "c"}
    assert all(len(samples.ms) == 3 for samples in found.values())


def test_a_ratio_is_taken_round_by_round() -> None:
    # Rounds differ tenfold, the ratio does not.
    found = ratio(Samples((1.0, 10.0, 2.0, 5.0)), Samples((2.0, 20.0, 4.0, 10.0)))
    assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.quiet  # a thread looks every few milliseconds
def test_peak_memory_sees_what_was_held_and_given_back() -> None:
    with Weighing() as weighing:
        # Pages of their own: the heap of this process may have as much to spare, and would not grow.
        with mmap.mmap(-1, 64_000_000) as pages:
            for start in range(0, len(pages), mmap.PAGESIZE):
                pages[start] = 1
            time.sleep(0.1)
    assert 60_000_000 < weighing.peak - weighing.before < 80_000_000


def test_wins_and_targets() -> None:
    fast, slow, short, many = result().rows
    assert (fast.wins, fast.keeps_target) == (True, True)
    assert (slow.wins, slow.keeps_target) == (False, True)
    assert (short.wins, short.keeps_target) == (True, False)
    assert (many.wins, many.keeps_target) == (True, True)


def test_results_of_older_days_are_read_with_ratios_in_todays_direction() -> None:
    row = {"case": "x", "ours": 1.0, "theirs": 8.0, "ratio": 8.0, "low": 4.0, "high": 10.0, "unit": "ms", "note": ""}
    old = {**result().to_json(), "rows": [{**row, "target": 5.0, "higher_is_better": True}]}
    (read_back,) = Result.from_json(old).rows
    assert (read_back.ratio, read_back.low, read_back.high, read_back.target) == (0.125, 0.1, 0.25, 0.2)
    assert read_back.wins and read_back.keeps_target and read_back.shown_ratio == "0.12"


def test_losing_rows_are_red() -> None:
    console = Console(record=True, width=120, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        show(result(), console)
    lines = {line.split()[0].strip("\x1b[0m"): line for line in captured.get().splitlines() if line.strip()}
    assert "\x1b[32m0.50" in lines["fast"] and "\x1b[31m1.50" in lines["slow"] and "\x1b[31m0.90" in lines["short"]


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    path = save(result(), tmp_path)
    assert Result.from_json(json.loads(path.read_text())).rows == result().rows


def test_the_picture_is_well_formed_with_a_bar_a_row_in_its_colour(tmp_path: Path) -> None:
    drawn = ElementTree.parse(draw(result(), tmp_path / "plot.svg")).getroot()
    bars = [node.get("class") for node in drawn.iter() if node.tag.endswith("rect") and node.get("class") != "paper"]
    assert bars == ["won", "lost", "lost", "won"]
    width = float(drawn.get("viewBox", "").split()[2])
    assert all(float(node.get("x2", 0)) <= width for node in drawn.iter() if node.tag.endswith("line"))


def test_the_report_of_the_newest_day_says_what_is_lost_first(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for day in ("2026-01-02", "2026-01-10"):
        draw(result(), save(result(), tmp_path / day).with_suffix(".svg"))
    day = newest(tmp_path)
    assert day is not None and day.name == "2026-01-10"
    text = write(read(day), day / "report.md").read_text()
    assert "# Benchmarks, 2026-01-10" in text and "3 of 4 comparisons won, 1 lost, 1 won but short of" in text
    lost, won = text.split("## What we win by most")
    assert "- sample, slow: 1.50 × torch" in lost and "- sample, short: 0.90 × torch, target ≤ 0.5" in lost
    assert won.index("sample, many: 0.33") < won.index("sample, fast: 0.50")
    assert "**target missed**" in won and "![sample](sample.svg)" in won


def test_peers_that_are_not_installed_are_not_asked() -> None:
    found = peers.installed()
    assert found[0] == peers.FSDP2
    assert (peers.DEEPSPEED in found) == (importlib.util.find_spec("deepspeed") is not None)
    assert set(peers.RIVAL) == set(peers.MODULES)


@pytest.mark.parametrize("name", [*CASES, "mlp-128"])
def test_every_model_trains(name: str) -> None:
    case = (CASES | SIZES)[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(list(model.parameters()))
    batch = case.batch(torch.Generator().manual_seed(0))
    before = case.loss(model, batch)
    before.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert torch.isfinite(case.loss(model, batch))


def test_benchmark_on_a_device_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with mock.patch("sys.argv", ["ddp", "--device", "cuda"]), pytest.raises(SystemExit) as ended:
        ddp.main()
    assert ended.value.code == 2
    assert "torch can use no such device here (it has none), and 2 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_imports_is_there(name: str) -> None:
    importlib.import_module(f"bench.{name}")
