"""ORCHESTRATE: data-parallel training of a module, gradients reduced during backward."""

from .features.precision import MixedPrecision
from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel", "MixedPrecision"]
