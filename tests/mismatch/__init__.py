"""Ranks that do not mean the same: every kind of setting that may differ, on every backend."""
