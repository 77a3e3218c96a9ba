"""What `make test` leaves out: crossings; never a value, nor a pair where pairs were asked for, nor what found a mutant."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breadth import cover
from tests.cluster.process import ROOT

SHAPES = [(1,), (3,), (2, 2), (5, 2), (2, 2, 2), (3, 2, 2, 2), (7, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_value_or_pair_of_values_is_chosen(shape: tuple[int, ...], strength: int) -> None:
    crossings = list(itertools.product(*map(range, shape)))
    chosen = [crossings[place] for place in cover(crossings, strength)]
    strength = min(strength, len(shape))
    for several in itertools.combinations(range(len(shape)), strength):
        wanted = set(itertools.product(*(range(shape[each]) for each in several)))
        assert {tuple(crossing[each] for each in several) for crossing in chosen} == wanted


def test_few_are_chosen_and_values_by_turns() -> None:
    assert len(cover(list(itertools.product(range(2), repeat=3)), 2)) == 4
    rows = list(itertools.product(range(10), range(2)))
    chosen = [rows[place] for place in cover(rows, 1)]
    assert len(chosen) == 10 and sum(backend for _, backend in chosen) == 5


def test_what_was_asked_for_first_is_chosen_and_counts() -> None:
    rows = list(itertools.product(range(2), range(2)))
    assert cover(rows, 1, first=[1]) == {1, 2}
    assert cover(rows, 2, first=[3]) == {0, 1, 2, 3}


FILE = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("backend", ["gloo", "phalanx", pytest.param("nccl", marks=pytest.mark.thorough)])
def test_crossed(row, backend):
    pass

@pytest.mark.parametrize("row", range(3))
def test_plain(row):
    pass
"""


@pytest.mark.thorough
def test_the_rest_is_thorough_and_runs_when_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "test_inner.py"
    file.write_text(FILE)

    def names(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "tests.conftest"]
        command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", *options]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
        return {line.rpartition("::")[2] for line in said.splitlines() if "::" in line}

    usual, thorough = names(str(file)), names("-m", "thorough", str(file))
    assert len(usual) == 6 + 3 and len(thorough) == 6 + 6 and not usual & thorough
    one = min(thorough)
    assert names(f"{file}::{one}") == {one}


def test_what_notices_the_mutants_is_in_make_test(request: pytest.FixtureRequest) -> None:
    listed = json.loads((ROOT / "tests" / "mutants" / "caught.json").read_text())
    wanted = {name for names in listed.values() for name in names if name.startswith("tests/")}
    here = {item.nodeid for item in request.session.items}
    files = {name.partition("::")[0] for name in here}
    if request.config.option.keyword or not all(name.partition("::")[0] in files for name in wanted):
        pytest.skip("only a run of the whole suite can tell")
    assert not wanted - here
