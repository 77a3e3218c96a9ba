"""The error with which a cluster call fails a test."""

from __future__ import annotations

from collections.abc import Mapping


class ClusterFailure(AssertionError):
    """A call in which a rank raised, died, hung or leaked.

    `errors` maps each failed rank to its traceback or to what is known of its end, first to fail first.
    """

    def __init__(self, message: str, errors: Mapping[int, str]) -> None:
        super().__init__(message)
        self.errors = dict(errors)
