"""The way of a gradient, as docs/design/reducer.md has it: true of steps that are run, and the counts are right."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from tests.cluster import spawn_ranks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "phalanx"

Step = tuple[int, str, list[str]]
Called = list[tuple[str, str]]  # file and function

# As the page has them, one after the other: the backend, and whether and how a ZeRO optimizer steps.
WALKS = [("gloo", None), ("phalanx", None), ("gloo", "alone"), ("gloo", "in backward")]
IDS = ["gloo", "shared memory", "zero", "zero in backward"]
walks = pytest.mark.parametrize("index", range(len(WALKS)), ids=IDS)


def _section() -> str:
    page = (ROOT / "docs" / "design" / "reducer.md").read_text()
    return page.split("## The way of a gradient\n")[1].split("\n## ")[0]


def _parts() -> list[tuple[int, int, list[Step]]]:
    """Of each list: files and times back as stated before it, and its steps."""
    parts: list[tuple[int, int, list[Step]]] = []
    for line in _section().split("\nBeside the road")[0].splitlines():
        if stated := re.search(r"(\d+) files, (\d+) times back", line):
            parts.append((int(stated[1]), int(stated[2]), []))
        elif step := re.match(r"(?:- \()?(\d+)[.)] `(\S+\.py)` ([^:]*):", line):
            parts[-1][2].append((int(step[1]), step[2], re.findall(r"`([\w.]+)`", step[3])))
    return parts


def _walks() -> list[tuple[int, int, list[Step]]]:
    """The first list, and the others put into it in the place of the steps whose numbers they have, or after them."""
    (files, back, first), *others = _parts()
    walks = [(files, back, first)]
    for files, back, steps in others:
        replaced = {number for number, _, _ in steps}
        rest = [step for step in first if step[0] not in replaced]
        walks.append((files, back, sorted([*rest, *steps], key=lambda step: step[0])))
    return walks


def _beside() -> list[str]:
    return re.findall(r"`([\w/]+/(?:\w+\.py|\*))`", _section().split("\nBeside the road")[1])


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_there_are_as_many_walks_as_are_run() -> None:
    assert [len(steps) > 15 for _, _, steps in _walks()] == [True] * len(WALKS)


@walks
def test_functions_are_where_the_walk_says(index: int) -> None:
    for _, file, functions in _walks()[index][2]:
        assert functions and not set(functions) - _defined(PACKAGE / file), (file, functions)


def test_what_is_beside_the_road_is_there() -> None:
    assert [one for one in _beside() if not list(PACKAGE.glob(one))] == []


@walks
def test_files_and_times_back_are_counted_right(index: int) -> None:
    files, back, steps = _walks()[index]
    opened: list[str] = []
    num_back, here = 0, ""
    for _, file, _ in steps:
        num_back += file != here and file in opened
        opened, here = [*opened, file], file
    assert (len(set(opened)), num_back) == (files, back)


class _Recorder:
    """What of the package is called, in every thread that begins while it is told to listen."""

    def __init__(self) -> None:
        self.called: Called = []
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and (path := Path(code.co_filename)).is_relative_to(PACKAGE):
            self.called.append((str(path.relative_to(PACKAGE)), code.co_qualname))


def _steady_step(rank: int, world: int, zero: str | None) -> Called:
    """What the fourth step calls, from the beginning of backward on. Two buckets; gradients large and small."""
    recorder = _Recorder()
    threading.setprofile(recorder)  # the thread of a group's lane begins with the first collective
    group = dist.new_group()
    try:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        model = phalanx.DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.6)
        optim: Any
        if zero is None:
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            adam, overlaps = torch.optim.Adam, zero == "in backward"
            optim = phalanx.ZeroRedundancyOptimizer(
                model.parameters(), adam, process_group=group, overlap_with_ddp=overlaps, lr=1e-3
            )
        torch.manual_seed(rank + 1)
        for step in range(4):
            optim.zero_grad()
            loss = model(torch.randn(8, 256)).sum()
            recorder.is_on = step == 3
            sys.setprofile(recorder if recorder.is_on else None)
            loss.backward()
            optim.step()
    finally:
        recorder.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)
        dist.destroy_process_group(group)
    return recorder.called


@walks
def test_a_steady_step_goes_the_way_of_the_walk(index: int) -> None:
    backend, zero = WALKS[index]
    # Fresh: what earlier tests made in a process still listens there, or ends in the midst of the step.
    ended = spawn_ranks(2, _steady_step, zero, backend=backend)[0]
    assert ended.exitcode == 0, ended.error_text
    called: Called = ended.value
    steps = _walks()[index][2]
    named = {(file, name) for _, file, names in steps for name in names}
    assert sorted(named - set(called)) == [], "named, and not called"
    known = [*(file for _, file, _ in steps), *_beside()]
    met = {file for file, _ in called}
    assert [file for file in sorted(met) if not any(fnmatch.fnmatch(file, one) for one in known)] == [], "met, and not named"
    if backend == "gloo":  # in shared memory another thread may do its part a little sooner or later
        rest = iter(called)
        assert [(file, names[0]) for _, file, names in steps if (file, names[0]) not in rest] == [], "in another order"
