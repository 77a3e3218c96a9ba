"""Optimizers whose state, and if wished gradients, are divided among the ranks."""

from .comm_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from .optimizer import ZeroRedundancyOptimizer
from .partition.kinds import elementwise

__all__ = ["ZeroRedundancyOptimizer", "elementwise", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
