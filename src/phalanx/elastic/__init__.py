"""Training that goes on when a rank dies, and when one comes."""

from .training import Training, run

__all__ = ["Training", "run"]
