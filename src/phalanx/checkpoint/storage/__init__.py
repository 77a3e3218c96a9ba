"""Checkpoints as files: their form, the disk they lie on, who writes, lists, verifies and deletes them.

Nothing in this room imports torch: the writer is a process of its own that has to start at once and stay small.
"""
