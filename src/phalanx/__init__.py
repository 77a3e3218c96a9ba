"""Phalanx: data-parallel training for PyTorch that is faster on one host and says what is wrong.

Importing it registers the c10d backend "phalanx", so that `init_process_group("phalanx")` works.
What few programs need and costs time to import (remote workers, the compiler) is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import optim
from .comm.bucket import GradBucket
from .ddp import DistributedDataParallel, MixedPrecision
from .errors import PhalanxError
from .launch.worker import Worker, init
from .swap.after_import import when_imported
from .zero import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from . import compile, observe, remote
    from .remote import DistributedOptimizer
    from .swap import install

__version__ = "0.1.0"

__all__ = [
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradBucket",
    "MixedPrecision",
    "PhalanxError",
    "Worker",
    "ZeroRedundancyOptimizer",
    "compile",
    "init",
    "install",
    "observe",
    "optim",
    "remote",
]

# For libraries that ask whether an optimizer is torch's sharded one. Registered and not derived from: importing that module
# takes longer than importing this package.
when_imported(
    "torch.distributed.optim.zero_redundancy_optimizer",
    lambda module: module.ZeroRedundancyOptimizer.register(ZeroRedundancyOptimizer),
)

_LAZY = {
    "DistributedOptimizer": (".remote", "DistributedOptimizer"),
    "compile": (".compile", None),
    "install": (".swap", "install"),
    "observe": (".observe", None),
    "remote": (".remote", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module, __name__)
    return loaded if attribute is None else getattr(loaded, attribute)
