"""Deliberate mistakes, made one at a time in a copy of the package: does the fuzzer, or a test, notice?

    python -m tests.mutants              all of them
    python -m tests.mutants NAME ...     these

Which ones there are: `of_*.py`. What a mutation is: `mutation.py`. How to add one: docs/design/testing.md, "Mutants".
"""
