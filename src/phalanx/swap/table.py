"""What is swapped for what, and what stays torch's.

Names only: torch's modules are patched once somebody has imported them, never imported from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def _wrapper() -> Any:
    from ..ddp.module import DistributedDataParallel

    return DistributedDataParallel


def _zero() -> Any:
    from ..zero.optimizer import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


def _remote() -> Any:
    from ..remote.optimizer import DistributedOptimizer

    return DistributedOptimizer


def _hook(name: str) -> Callable[[], Any]:
    def load() -> Any:
        from ..comm import hooks

        return getattr(hooks, name)

    return load


def _zero_hook(name: str) -> Callable[[], Any]:
    def load() -> Any:
        from ..zero import comm_hooks

        return getattr(comm_hooks, name)

    return load


# Per module of torch: the names that become ours. Both paths of each class: people import from either.
SWAPPED: dict[str, dict[str, Callable[[], Any]]] = {
    "torch.nn.parallel": {"DistributedDataParallel": _wrapper},
    "torch.nn.parallel.distributed": {"DistributedDataParallel": _wrapper},
    "torch.distributed.optim": {"ZeroRedundancyOptimizer": _zero, "DistributedOptimizer": _remote},
    "torch.distributed.optim.zero_redundancy_optimizer": {"ZeroRedundancyOptimizer": _zero},
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": _remote},
    f"{_HOOKS}.default_hooks": {"allreduce_hook": _hook("allreduce_hook")},
    f"{_HOOKS}.debugging_hooks": {"noop_hook": _hook("noop_hook")},
    f"{_HOOKS}.ddp_zero_hook": {
        name: _zero_hook(name) for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved")
    },
}

# Modules of torch that build on the inside of its own class: there the name keeps meaning torch's. Dynamo asks the class for
# the model that runs, and would cut ours with torch's splitter.
# Compressing hooks stay torch's too: they run unchanged under our wrapper, and ours round otherwise (16-bit hooks of ours
# divide before they cast), so that the same script would end with other weights.
KEPT: dict[str, str] = {
    "torch.distributed._composable.replicate": "DistributedDataParallel",
    "torch._dynamo.convert_frame": "DistributedDataParallel",
}

# Where torch binds the functions that make groups. The last one imports them by name.
GROUP_MAKERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
