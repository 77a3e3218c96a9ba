"""A differential fuzzer for whole training programs: drawn from a seed, run on ranks, compared with the mean by hand.

    python -m tests.fuzz --seconds 600 --seed 0     as many programs as fit, from this seed on
    python -m tests.fuzz --replay 1234              one program, with its script

How it works, and what a failure looks like: docs/design/testing.md.
"""
