"""The mutations: small mistakes of the kind that people make, each of which must be caught.

How to add one. Write a `Mutation` below:

- `name`: what is broken, in words that will make sense in a list.
- `file`: the file, below the root of the repository.
- `old`: a piece of it, word for word, long enough to occur exactly once. Whole lines read best.
- `new`: what takes its place. It must still import: a mistake in the spelling of a name proves nothing.
- `words`: what a program of the fuzzer must have in order to come past this line (`tests/fuzz/traits.py`, `words_of`), so
  that few programs are needed. Several words: all of them.
- `tests`: test files that are run if the fuzzer does not notice.

Then `python -m tests.mutants NAME`. A mutation that is missed shows that a promise is not tested: add the test, or teach
the fuzzer to draw what is missing. One that cannot be seen from outside (a cache left out) does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake in one file, and who is expected to notice."""

    name: str
    file: str
    old: str
    new: str
    words: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


class Unmatched(Exception):
    """The old text of a mutation does not occur exactly once."""


def mutated(mutation: Mutation, source: str) -> str:
    """`source` with the mistake made. Raises Unmatched if the code has moved on without the mutation."""
    count = source.count(mutation.old)
    if count != 1:
        raise Unmatched(
            f"{mutation.name}: its old text occurs {count} times in {mutation.file}, expected once. "
            "Bring the mutation up to date in tests/mutants/catalogue.py."
        )
    return source.replace(mutation.old, mutation.new)


MUTATIONS = (
    Mutation(
        name="sparse: the parcel that did not fit is not sent again",
        file="phalanx/comm/sparse.py",
        old="        if needed <= sent:\n            return work\n",
        new="        if needed <= 2 * sent:\n            return work\n",
        words=("SparseWords", "many_rows"),
        tests=("tests/comm/test_sparse.py",),
    ),
    Mutation(
        name="sparse: the first rank's rows are left out of the sum",
        file="phalanx/comm/sparse.py",
        old="zip(self._parcels, self._rows, strict=True)\n            if rows\n",
        new="zip(self._parcels[1:], self._rows[1:], strict=True)\n            if rows\n",
        words=("SparseWords",),
        tests=("tests/comm/test_sparse.py",),
    ),
    Mutation(
        name="buckets: offsets do not count the parameter before",
        file="phalanx/plan/buckets.py",
        old="        offset += specs[param].numel\n",
        new="        offset += max(specs[param].numel - 1, 0)\n",
        tests=("tests/plan/test_buckets.py",),
    ),
    Mutation(
        name="buckets: a parameter that fills the cap exactly does not fit",
        file="phalanx/plan/buckets.py",
        old="        if filling.params and filling.num_bytes + spec.num_bytes > cap:\n",
        new="        if filling.params and filling.num_bytes + spec.num_bytes >= cap:\n",
        tests=("tests/plan/test_buckets.py",),
    ),
    Mutation(
        name="shards: the slice behind the last one loses an element",
        file="phalanx/plan/shards.py",
        old="    return -(-numel // world)\n",
        new="    return max(numel // world, 1)\n",
        words=("overlapped",),
        tests=("tests/plan/test_shards.py",),
    ),
    Mutation(
        name="shards: a cut unit is computed by one neighbour only",
        file="phalanx/plan/shards.py",
        old="        begin = start // UNIT * UNIT\n",
        new="        begin = start\n",
        words=("zero",),
        tests=("tests/plan/test_shards.py",),
    ),
)
