"""Torch's tests of the wrapper that are not run, each with its reason in one line."""

from __future__ import annotations

LEFT_OUT: dict[str, str] = {}

# Tests that ask for more than the two ranks that all others run on.
RANKS = {}
