"""The demo, short: it learns, its replicas are identical, and its report exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from phalanx.cli.demo.gpt import GPT, GPTShape
from phalanx.cli.demo.show import Story, spark_line
from phalanx.cli.demo.text import Text, batch, pieces_in_order
from phalanx.cli.demo.train import MARK
from phalanx.cli.main import main

pytestmark = pytest.mark.timeout(120)


def test_a_short_demo_learns_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--steps", "6", "--sample", "20", "--run-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    before, after = lines["held-out loss"].split("  ", 1)[1].split("→")
    assert float(before) > float(after) > 0
    assert "compared bit for bit" in lines["replicas identical"]
    (page,) = tmp_path.glob("*/report.html")
    text = page.read_text()
    assert "Held-out loss" in text and "phalanx demo" in text and "blocks." in text
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", text))
    closing = {name: line.split("  ", 1)[1].strip() for name, line in lines.items() if "  " in line}
    assert closing["loss"].split(",")[0].split("→")[1].strip() == tiles["Loss"]
    assert closing["held-out loss"].split("→")[1].strip() == tiles["Held-out loss"]
    assert closing["throughput"].split(" tokens/s")[0] == tiles["Throughput"]
    assert closing["communication hidden"] == tiles["Hidden"]
    (found,) = re.findall(r"(\d+) passes, (\d+) reductions? each", text)
    assert int(found[0]) == 6 and int(found[1]) > 2, "several buckets"


def test_nothing_held_out_is_trained_on() -> None:
    text = Text()
    training = set(text.decode(text.training).split("\n\n"))
    held_out = text.decode(text.held_out).split("\n\n")
    assert len(text.held_out) > 10_000
    assert not training & set(held_out)


def test_batches_are_pieces_of_the_text_and_what_follows() -> None:
    tokens = torch.arange(100)
    inputs, targets = batch(tokens, 5, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == (5, 8) and torch.equal(targets, inputs + 1)
    inputs, targets = pieces_in_order(tokens, 8)
    assert torch.equal(inputs.flatten(), torch.arange(96)) and torch.equal(targets, inputs + 1)


def test_the_gpt_sees_no_future_and_ties_its_weights() -> None:
    torch.manual_seed(0)
    gpt = GPT(GPTShape(11, 8, 16, 2, 2)).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    assert torch.equal(gpt(tokens)[:, :5], gpt(changed)[:, :5])
    assert gpt.output.weight is gpt.tokens.weight
    longer = gpt.continue_text(tokens[0], 20, temperature=1.0)
    assert len(longer) == 28 and torch.equal(longer[:8], tokens[0])


def test_the_story_keeps_lines_that_are_not_for_the_display() -> None:
    story = Story()
    story.hear(0, "stdout", MARK + '{"event": "step", "step": 5, "num_steps": 9, "loss": 1.5}')
    story.hear(1, "stderr", "a warning")
    assert story.progress == (5, 9) and story.losses == [1.5] and story.other_lines == ["a warning"]


def test_a_spark_line_is_as_wide_as_it_may_be() -> None:
    assert spark_line([], 10) == ""
    assert spark_line([1.0, 1.0], 10) == "▁▁"
    assert spark_line([float(value) for value in range(1000)], 8) == "▁▂▃▄▅▆▇█"
