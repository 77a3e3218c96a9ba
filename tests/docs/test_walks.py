"""The way of one gradient, as docs/design/reducer.md has it: the functions are where it says, and the counts are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "phalanx"

Step = tuple[int, str, list[str]]


def _parts() -> list[tuple[int, int, list[Step]]]:
    """Of each list: files and times back as stated before it, and its steps."""
    page = (ROOT / "docs" / "design" / "reducer.md").read_text()
    section = page.split("## The way of one gradient\n")[1].split("\nBeside the road")[0]
    parts: list[tuple[int, int, list[Step]]] = []
    for line in section.splitlines():
        if stated := re.search(r"(\d+) files, (\d+) times back", line):
            parts.append((int(stated[1]), int(stated[2]), []))
        elif step := re.match(r"(?:- \()?(\d+)[.)] `(\S+\.py)` ([^:]*):", line):
            parts[-1][2].append((int(step[1]), step[2], re.findall(r"`([\w.]+)`", step[3])))
    return parts


def _walks() -> list[tuple[int, int, list[Step]]]:
    """The first list, and the others put into it in the place of the steps whose numbers they have."""
    (files, back, first), *others = _parts()
    walks = [(files, back, first)]
    for files, back, steps in others:
        replaced = {number for number, _, _ in steps}
        rest = [step for step in first if step[0] not in replaced]
        walks.append((files, back, sorted([*rest, *steps], key=lambda step: step[0])))
    return walks


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_there_are_three_walks() -> None:
    assert [len(steps) > 15 for _, _, steps in _walks()] == [True] * 3


@pytest.mark.parametrize("index", range(3), ids=["gloo", "shared memory", "zero"])
def test_functions_are_where_the_walk_says(index: int) -> None:
    for _, file, functions in _walks()[index][2]:
        assert functions and not set(functions) - _defined(PACKAGE / file), (file, functions)


@pytest.mark.parametrize("index", range(3), ids=["gloo", "shared memory", "zero"])
def test_files_and_times_back_are_counted_right(index: int) -> None:
    files, back, steps = _walks()[index]
    opened: list[str] = []
    num_back, here = 0, ""
    for _, file, _ in steps:
        num_back += file != here and file in opened
        opened, here = [*opened, file], file
    assert (len(set(opened)), num_back) == (files, back)
