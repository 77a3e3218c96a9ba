"""A wrong argument is one clear error, of ours and of the built-in kind that users catch, before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.checkpoint.convert import to_dcp
from phalanx.checkpoint.source import CheckpointSource
from phalanx.checkpoint.storage.disk import disk_of
from phalanx.checkpoint.storage.library import entries
from phalanx.cli.main import main
from phalanx.observe.predict import fewest_hosts
from tests.bad_calls.calls import CALLS, try_all
from tests.cluster import run_ranks
from tests.observe.synthetic import training_events, write_trace


@pytest.fixture(scope="module")
def tried() -> list[dict[str, tuple[str, bool, str]]]:
    """All calls on two ranks, at once: what is refused leaves the group as it was."""
    return run_ranks(2, try_all, backend="phalanx")


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_one_clear_error(name: str, tried: list[dict[str, tuple[str, bool, str]]]) -> None:
    words = CALLS[name][1]
    for outcomes in tried:
        kind, is_ours, text = outcomes[name]
        assert kind != "nothing", "nobody noticed"
        assert is_ours, f"{kind}: {text}"
        assert words in text, text


HEADER = {"phalanx_trace": 1, "rank": 0, "world": 1, "boot": "b", "wall_ns": 0, "perf_ns": 0, "host": "h", "pid": 1}
TRACES: dict[str, list[Any]] = {
    "empty": [],
    "no header": [3],
    "a header of another kind": [{"phalanx_trace": 1}],
    "an event that is a number": [HEADER, 3],
    "an event that is nothing": [HEADER, []],
    "an unknown event": [HEADER, ["smell", "x", 1]],
    "a span cut short": [HEADER, ["span", "backward", 1]],
    "a span without attributes": [HEADER, ["span", "backward", 1, 2, 1, None]],
    "a span at no time": [HEADER, ["span", "backward", "soon", 2, 1, {}]],
    "a scalar that is text": [HEADER, ["scalar", "loss", 1, 1, "low"]],
    "a plan that is none": [HEADER, *training_events(0, 2), ["fact", "plan", 1, {"buckets": 3}]],
    "buckets that are text": [HEADER, ["span", "reduce", 1, 2, 1, {"bucket": "x", "bytes": "many", "ready_ns": "early"}]],
}


@pytest.mark.parametrize("name", TRACES)
def test_a_malformed_trace_is_one_line_and_no_traceback(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(line) for line in TRACES[name]]
    (tmp_path / "trace-rank0.jsonl").write_text("\n".join(lines) + "\n")
    try:
        main(["report", str(tmp_path)])
    except SystemExit as ended:
        said = capsys.readouterr().err
        # Exit code 0: a page could be made of it all the same.
        assert ended.code in (0, 2) and "Traceback" not in said, said
        assert ended.code == 0 or (said.startswith("error: ") and str(tmp_path) in said), said


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a network at no speed": (["plan", "FOLDER/model.py:make", "--gbit", "nan"], "is not a number"),
    "a latency that is none": (["plan", "FOLDER/model.py:make", "--latency-us", "nan"], "is not a number"),
    "hours that are none": (["checkpoints", "FOLDER", "delete", "--abandoned-after", "nan"], "is not a number"),
    "days that are none": (["runs", "--clean", "-y", "--older-than", "nan"], "is not a number"),
    "seconds that are none": (["demo", "--seconds", "nan"], "is not a number"),
    "exported to a folder": (["checkpoints", "FOLDER/saves", "export", "torch", "FOLDER"], "could not be written"),
    "exported to nowhere": (["checkpoints", "FOLDER/saves", "export", "torch", "FOLDER/no/file"], "could not be written"),
    "exported to no name": (["checkpoints", "FOLDER/saves", "export", "torch", ""], "could not be written"),
    "exported into a file": (["checkpoints", "FOLDER/saves", "export", "dcp", "FOLDER/model.py"], "could not be written"),
    "imported from half a folder": (["checkpoints", "FOLDER", "import", "dcp", "FOLDER/half"], "is truncated or damaged"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_one_line_and_no_traceback(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = COMMANDS[name]
    (tmp_path / "model.py").write_text("import torch\nmake = lambda: torch.nn.Linear(2, 2)\n")
    if "checkpoints" in arguments:
        with phalanx.Checkpointer(tmp_path / "saves", torch.nn.Linear(2, 2)) as saver:
            saver.save(1)
        to_dcp(CheckpointSource(disk := disk_of(str(tmp_path)), entries(disk, f"{tmp_path}/saves")[0]), f"{tmp_path}/half")
        for data in (tmp_path / "half").glob("*.distcp"):
            data.write_bytes(data.read_bytes()[:8])
    with pytest.raises(SystemExit) as ended:
        main([argument.replace("FOLDER", str(tmp_path)) for argument in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and "Traceback" not in said, said
    assert words in said and said.count("\n") == 1, said


def test_a_world_of_any_size_is_planned_for_at_once() -> None:
    assert fewest_hosts(10**20, 8) == 10**20 // 8


def test_a_whole_trace_is_taken(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 1, training_events(0, 2))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 0
