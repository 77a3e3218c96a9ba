"""Training that goes on when a rank dies, and when one comes."""

from ..launch.elastic.story import Event, What
from .training import Training, run

__all__ = ["Event", "Training", "What", "run"]
