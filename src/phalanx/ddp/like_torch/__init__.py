"""Passing for torch's class: its base, and the names of it that other libraries touch."""
