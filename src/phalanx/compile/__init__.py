"""ORCHESTRATE: torch.compile for wrapped models, graphs cut where gradient buckets close."""

from .backend import phalanx_backend, register
from .explain import explain
from .explanation import ExplainedPiece, Explanation
from .optimizer import DDPOptimizer

__all__ = ["DDPOptimizer", "ExplainedPiece", "Explanation", "explain", "phalanx_backend", "register"]
