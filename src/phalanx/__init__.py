"""Phalanx: data-parallel training for PyTorch that is faster on one host and says what is wrong.

Importing it registers the c10d backend "phalanx", so that `init_process_group("phalanx")` works. What few programs need
and costs time to import (remote workers, the compiler) is loaded at first use; in the `phalanx` command everything is.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import compile, data, elastic, observe, optim, remote
    from .checkpoint import Checkpointer
    from .comm.bucket import GradBucket
    from .ddp import DistributedDataParallel, MixedPrecision
    from .errors import PhalanxError
    from .launch.worker import Worker, init
    from .remote import DistributedOptimizer
    from .swap import install
    from .zero import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradBucket",
    "MixedPrecision",
    "PhalanxError",
    "Worker",
    "ZeroRedundancyOptimizer",
    "compile",
    "data",
    "elastic",
    "init",
    "install",
    "observe",
    "optim",
    "remote",
]

# Where each public name is. Every training script needs these.
_NEEDED = {
    "DistributedDataParallel": ".ddp",
    "GradBucket": ".comm.bucket",
    "MixedPrecision": ".ddp",
    "PhalanxError": ".errors",
    "Worker": ".launch.worker",
    "ZeroRedundancyOptimizer": ".zero",
    "init": ".launch.worker",
}
_AT_FIRST_USE = {"Checkpointer": ".checkpoint", "DistributedOptimizer": ".remote", "install": ".swap"}
_MODULES = ("compile", "data", "elastic", "observe", "optim", "remote")


def _imports_all() -> bool:
    """Whether to import torch now: not in the command, started as `phalanx` or as `python -m phalanx[.cli.main]`."""
    command = sys.modules.get("phalanx_command")
    module = sys.orig_argv[sys.orig_argv.index("-m") :][1:2] if "-m" in sys.orig_argv else []
    as_module = module in (["phalanx"], ["phalanx.cli.main"])
    return not (as_module or getattr(command, "is_running", False))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    place = _NEEDED.get(name) or _AT_FIRST_USE.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(place, __name__), name)
    globals()[name] = found
    return found


if _imports_all():
    optim = importlib.import_module(".optim", __name__)  # the same module, for type checkers
    for _name in _NEEDED:
        __getattr__(_name)

    # For libraries that ask whether an optimizer is torch's sharded one. Registered and not derived from: importing that
    # module takes longer than importing this package.
    importlib.import_module(".swap.after_import", __name__).when_imported(
        "torch.distributed.optim.zero_redundancy_optimizer",
        lambda module: module.ZeroRedundancyOptimizer.register(__getattr__("ZeroRedundancyOptimizer")),
    )
