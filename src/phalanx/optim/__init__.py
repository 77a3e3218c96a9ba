"""Optimizers that run where gradients appear."""

from .in_backward import InBackward, apply_in_backward

__all__ = ["InBackward", "apply_in_backward"]
