"""Optimizers whose state, and if wished gradients, are divided among the ranks."""

from .hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from .kinds import elementwise
from .optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "elementwise", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
