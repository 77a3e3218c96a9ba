"""ORCHESTRATE: data-parallel training of a module, gradients reduced during backward."""

from .module import DistributedDataParallel
from .precision import MixedPrecision

__all__ = ["DistributedDataParallel", "MixedPrecision"]
