"""What a mutation is: one mistake in one file, and what is most likely to notice it.

How to add one: docs/design/testing.md, "Mutants". Knows nothing of how mutations are tried out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` occurs exactly once in `file` and is replaced by `new`; so is the first of each pair of `also` by the second.

    `words`: what a program of the fuzzer has to have in order to come past these lines (`tests/fuzz/traits.py`,
    `words_of`), all of them, separated by blanks. `tests`: test files, or tests in them, that are run before the fuzzer
    searches; by path, separated by blanks.
    """

    name: str
    file: str
    old: str
    new: str
    words: str = ""
    tests: str = ""
    also: tuple[tuple[str, str], ...] = ()

    @property
    def test_paths(self) -> list[str]:
        return self.tests.split()


class Unmatched(Exception):
    """An old text of a mutation does not occur exactly once."""


def mutated(mutation: Mutation, source: str) -> str:
    """`source` with the mistake made. Raises Unmatched if the code has moved on without the mutation."""
    for old, new in ((mutation.old, mutation.new), *mutation.also):
        count = source.count(old)
        if count != 1:
            raise Unmatched(
                f"{mutation.name}: this text occurs {count} times in {mutation.file}, expected once:\n{old}"
                "Bring the mutation up to date in tests/mutants."
            )
        source = source.replace(old, new)
    return source
