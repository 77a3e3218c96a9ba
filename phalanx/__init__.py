"""Phalanx: data-parallel training for PyTorch that is faster on one host and says what is wrong."""

from .ddp import DistributedDataParallel, MixedPrecision
from .errors import PhalanxError

__all__ = ["DistributedDataParallel", "MixedPrecision", "PhalanxError"]
__version__ = "0.1.0"
