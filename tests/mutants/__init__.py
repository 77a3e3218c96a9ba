"""Deliberate mistakes, made one at a time in a copy of the package: does the fuzzer, or a test, notice?

    python -m tests.mutants              all of them
    python -m tests.mutants NAME ...     these

What a mutation is and how to add one: `catalogue.py`. Design: docs/design/testing.md.
"""
