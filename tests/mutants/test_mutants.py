"""The mutations fit the code, and the machinery tells caught from missed. Whether they are caught: `make mutants`."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.fuzz.traits import words_of
from tests.fuzz.wider import FIRST, draw
from tests.mutants.__main__ import CAUGHT
from tests.mutants.catalogue import MUTATIONS
from tests.mutants.mutation import Mutation, Unmatched, mutated

ROOT = Path(__file__).resolve().parents[2]


FILES = sorted({mutation.file for mutation in MUTATIONS})


@pytest.mark.parametrize("file", FILES)
def test_the_mutations_of_a_file_fit_the_code_as_it_is(file: str) -> None:
    text = (ROOT / file).read_text()
    for mutation in (mutation for mutation in MUTATIONS if mutation.file == file):
        ast.parse(mutated(mutation, text))
        assert all((ROOT / path.partition("::")[0]).exists() for path in mutation.test_paths), mutation.name


def test_names_are_different_and_words_are_drawn() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    drawn = {word for seed in (*range(2000), *range(FIRST, FIRST + 500)) for word in words_of(draw(seed))}
    assert {word for mutation in MUTATIONS for word in mutation.words.split()} <= drawn


def test_what_caught_a_mutation_is_known_of_no_other() -> None:
    # Of one that is missing here, `make mutants` looks for what catches it, which takes longer.
    assert set(json.loads(CAUGHT.read_text())) <= {mutation.name for mutation in MUTATIONS}


def test_text_that_is_gone_or_occurs_twice_is_refused() -> None:
    mutation = Mutation("nothing", "file.py", "x = 1\n", "x = 2\n", also=(("z = 1\n", "z = 2\n"),))
    assert mutated(mutation, "x = 1\ny = 1\nz = 1\n") == "x = 2\ny = 1\nz = 2\n"
    for source in ("y = 1\nz = 1\n", "x = 1\nx = 1\nz = 1\n", "x = 1\n"):
        with pytest.raises(Unmatched, match="tests/mutants"):
            mutated(mutation, source)
