"""Optimizers whose state, and if wished gradients, are divided among the ranks."""

from .kinds import elementwise
from .optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "elementwise"]
